"""GrammarClient: the engine's end of a process that follows grammars. IsolatedConstraint: one request there."""

import contextlib
import logging
import os
import signal
import socket
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import Protocol
from weakref import WeakValueDictionary

import msgspec
import numpy as np
from numpy.typing import NDArray

from phase0_request.batch import GRAMMAR_FAILED, Forced
from phase0_request.request import Request
from phase6_integration.process.messages import CHUNK, Frames, frame
from phase6_integration.wings.structured.grammar_process import (
    OPENING,
    Ask,
    ChildReady,
    CpuTime,
    Drop,
    Follows,
    FromChild,
    Leaving,
    Mask,
    Open,
    Take,
    ToChild,
    from_child,
)

log = logging.getLogger(__name__)
PATIENCE = 0.01  # seconds that a step waits for masks
STALLED = 30.0  # seconds without an answer after which a process is killed: if it was stopped, no other limit ends it
FAILED_STARTS = 3  # of a process, in a row: then something else is wrong
TOO_MUCH = f"{GRAMMAR_FAILED}: it took more time or memory than it may use"


class IsolatedConstraint:
    """One request's constraint. It knows what its process has been told, and the latest answers."""

    def __init__(self, key: int, request: Request, client: "GrammarClient") -> None:
        self.key = key
        self.params = request.params
        self.output: Sequence[int] = request.output_tokens  # committed
        self.error: str | None = None
        self.opened = False  # its process knows it
        self.serial = 0  # of the last message
        self._client = client
        self._followed: list[int] = []  # what its process follows, when it has read all messages
        self._taken: tuple[int, int] | None = None  # the last message, if it was a token: its index, and the token
        self._follows: Forced | None = None  # the answer to that
        self._making: int | None = None  # the index of the mask that will come
        self._mask: tuple[int, NDArray[np.uint32]] | None = None
        self._deadline = 0.0  # until when a step waits for what follows

    def take(self, index: int, token: int) -> None:
        """As Constraint.take."""
        if index >= len(self.output) and self._taken != (index, token):
            del self._followed[index:]
            self._followed.append(token)
            self._tell(Take(self.key, self.serial + 1, index, token))

    def forced(self, index: int) -> Forced | None:
        """As Constraint.forced. None also if the answer has not come in time: then forced tokens are drawn."""
        if self._taken is None or self._taken[0] != index:
            return None
        self._client.wait(lambda: self._follows is not None or self.error is not None, self._deadline)
        return self._follows if self._follows and (self._follows.tokens or self._follows.ends) else None

    def ask(self, index: int) -> bool:
        """Have the mask of an output token made, unless it is there or will come. False if it cannot be made yet."""
        if index > max(len(self._followed), len(self.output)):
            return False  # it depends on a token that was not drawn
        if index > len(self._followed):  # the output has tokens that were never taken
            self._followed, self.opened = [*self.output[:index]], False
        if index != self._making and (self._mask is None or self._mask[0] != index):
            del self._followed[index:]
            self._tell(Ask(self.key, self.serial + 1, index))
        return True

    def mask(self, index: int, started: float) -> NDArray[np.uint32] | None:
        """The mask of an output token, waited for as long as a step may that began to wait then. None: it is late."""
        deadline = started + self._client.patience
        while self.ask(index) and not self._ready(index):
            self._client.wait(lambda: self._making != index, deadline)  # it has come, or that of another place
            if time.monotonic() >= deadline:
                break
        if self.error is not None or self._mask is None or self._mask[0] != index:
            return None
        return self._mask[1]

    def done(self) -> bool:
        """Whether the mask of the next token of the output is ready, or will never be."""
        return self.error is not None or (self.ask(len(self.output)) and self._ready(len(self.output)))

    def _ready(self, index: int) -> bool:
        return self.error is not None or (self._mask is not None and self._mask[0] == index)

    def _tell(self, message: Take | Ask) -> None:
        self.serial, self._follows, self._mask = self.serial + 1, None, None
        self._taken = (message.index, message.token) if isinstance(message, Take) else None
        self._making = message.index + isinstance(message, Take)  # if the token forces no others
        self._deadline = time.monotonic() + self._client.patience
        self._client.tell(self, message)

    def opening(self) -> list[ToChild]:
        """The messages that have a process begin with what is followed so far, and answer the last message."""
        if self._taken is None:
            return [Open(self.key, self.serial, self.params, [*self._followed])]
        index, token = self._taken
        return [Open(self.key, 0, self.params, self._followed[:index]), Take(self.key, self.serial, index, token)]

    def receive(self, message: Follows | Mask) -> None:
        """Note an answer to the last message."""
        if isinstance(message, Mask):
            self._making = None
            self._mask = message.index, np.frombuffer(message.bits, np.uint32)
            self.error = message.error
        else:
            assert self._taken is not None
            self._follows = Forced(tuple(message.tokens), message.ends)
            self._followed[self._taken[0] + 1 :] = message.tokens
            self._making = len(self._followed)


class Processes(Protocol):
    """What starts processes, and waits for all of them."""

    def connect(self, client: "GrammarClient") -> socket.socket: ...

    def watch(self, connection: socket.socket, client: "GrammarClient", writes: bool) -> None: ...

    def unwatch(self, connection: socket.socket) -> None: ...

    def receive(self, timeout: float) -> None: ...

    def spent(self, client: "GrammarClient", seconds: float) -> None: ...


class GrammarClient:
    """The engine's end of a process that follows grammars, with the requests of that process. A process that ends is
    replaced, and its requests are sent to the next one.

    A process compiles one grammar at a time; the grammar of a request that has been aborted meanwhile is never sent.
    If a process dies with several messages to answer, its successor gets one message at a time, which shows the message
    that kills it.
    """

    def __init__(self, engine: Processes, tenant: str) -> None:
        self.tenant = tenant  # that it was made for; others may share it
        self._engine = engine
        self._connection: socket.socket | None = None
        self._frames = Frames(from_child)
        self._unsent = bytearray()
        self._started = False
        self._failed_starts = 0  # in a row
        self._pid = 0
        self._since = 0.0  # when it last sent something, or was first sent something
        self._suspects: set[int] = set()  # requests with which a process died: until answered, each is sent alone
        self._tenants: dict[int, str] = {}  # of the requests, by their keys
        self._known: WeakValueDictionary[int, IsolatedConstraint] = WeakValueDictionary()
        self._waiting: deque[int] = deque()  # keys of requests to be opened
        self._held: deque[tuple[int, Take | Ask]] = deque()  # messages that a careful client has not sent yet
        self._unanswered: dict[int, int] = {}  # the serial of the last message sent, by the key of the request
        self._opening: int | None = None  # the request that is being opened
        self._has_unsent = False  # and the selector knows
        self.patience = PATIENCE  # 0 after masks that took longer than that

    def __len__(self) -> int:
        return len(self._tenants)

    @property
    def tenants(self) -> Collection[str]:
        """The clients of the requests: mostly one. A client with several requests counts as often."""
        return self._tenants.values()

    def add(self, constraint: IsolatedConstraint, tenant: str) -> None:
        self._known[constraint.key] = constraint
        self._tenants[constraint.key] = tenant

    def tell(self, constraint: IsolatedConstraint, message: Take | Ask) -> None:
        """Send a message about a request; about one that the process does not know, an Open instead."""
        if constraint.opened:
            self._held.append((constraint.key, message))
        elif constraint.key not in self._waiting:
            self._waiting.append(constraint.key)
        self._send()

    def drop(self, key: int) -> None:
        """Forget a request that has ended."""
        self._known.pop(key, None)
        self._tenants.pop(key, None)
        self._suspects.discard(key)
        if key in self._waiting:
            self._waiting.remove(key)
        elif self._connection is not None:
            self._write(Drop(key))
        self._send()

    def wait(self, done: Callable[[], bool], deadline: float) -> None:
        """Receive until `done`, or until the deadline. What has arrived is read in any case."""
        while not done():
            left = deadline - time.monotonic()
            self._engine.receive(max(left, 0.0))
            if left <= 0:
                return

    # The process.

    def _send(self) -> None:
        """Send what may be sent now."""
        if not self._unanswered:
            self._since = time.monotonic()
        if (self._held or self._waiting) and not self._connect():
            return
        while self._held and not (self._suspects and self._unanswered):
            key, message = self._held.popleft()
            constraint = self._known.get(key)
            if constraint is not None and constraint.opened:
                self._unanswered[key] = message.serial
                self._write(message)
        while self._waiting and self._opening is None and not (self._suspects and self._unanswered):
            key = self._waiting.popleft()
            constraint = self._known.get(key)
            if constraint is not None and constraint.error is None:
                self._opening, constraint.opened = key, True
                self._unanswered[key] = constraint.serial
                for one in constraint.opening():
                    self._write(one)
        self.flush()

    def _connect(self) -> bool:
        """Connect to a process, unless there is one. False if there is no socket for it: all that wait have failed."""
        if self._connection is None:
            try:
                self._connection = self._engine.connect(self)
            except OSError:  # too many open files, say
                self._cannot_start()
                self.close()
                return False
        return True

    def _write(self, message: ToChild) -> None:
        self._unsent += frame(message)

    def flush(self) -> None:
        """Send as much as the socket takes now."""
        if self._connection is None:
            return
        try:
            with contextlib.suppress(BlockingIOError):
                while self._unsent:
                    del self._unsent[: self._connection.send(self._unsent)]
        except OSError:  # it has ended, which is read next
            self._unsent.clear()
        if self._has_unsent != bool(self._unsent):
            self._has_unsent = bool(self._unsent)
            self._engine.watch(self._connection, self, self._has_unsent)

    def read(self) -> None:
        """Read the answers that have come, or that the process has ended."""
        assert self._connection is not None
        try:
            data = self._connection.recv(CHUNK)
        except BlockingIOError:
            return None
        except OSError:
            data = b""
        if not data:
            return self.ended()
        self._since = time.monotonic()
        try:
            for message in self._frames.feed(data):
                self._receive(message)
        except (msgspec.MsgspecError, ValueError):  # it writes what is no message
            log.exception("a process that follows grammars is not understood")
            return self.ended()
        return self._send()

    def check(self, now: float) -> None:
        """Kill a process that does not answer."""
        if self._started and self._unanswered and now - self._since > STALLED:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)

    def _receive(self, message: FromChild) -> None:
        match message:
            case ChildReady(pid=pid):
                self._pid, self._started, self._failed_starts = pid, True, 0
            case CpuTime(seconds=seconds):
                self.patience = 0.0 if seconds > PATIENCE else PATIENCE
                self._engine.spent(self, seconds)
            case Follows(key=key, serial=serial) | Mask(key=key, serial=serial):
                constraint, is_mask = self._known.get(key), isinstance(message, Mask)
                if is_mask and self._opening == key:
                    self._opening = None
                if is_mask and self._unanswered.get(key) == serial:
                    del self._unanswered[key]
                    self._suspects.discard(key)
                if constraint is not None and constraint.serial == serial:
                    constraint.receive(message)
            case Leaving():
                self._replace()

    def ended(self) -> None:
        """The process has ended. If it had one message to answer, that has killed it."""
        keys = [*self._unanswered]
        if not self._started:
            self._failed_starts += 1
            if self._failed_starts >= FAILED_STARTS:
                self._cannot_start()
        elif keys:
            self._engine.spent(self, OPENING)  # at most: it did not say
            self._suspects = {*keys} if len(keys) > 1 else set()
            if len(keys) == 1:
                log.warning("a grammar ended the process that followed it")
                self._fail(keys, TOO_MUCH)
        self._replace()

    def _cannot_start(self) -> None:
        log.error("the process that follows grammars cannot be started")
        self._fail([*self._unanswered, *self._waiting], "the process that follows grammars cannot be started")

    def _replace(self) -> None:
        """Have another process go on with what this one has not answered."""
        lost = [*self._unanswered, *(key for key, _ in self._held)]
        self.close()
        for constraint in [*self._known.values()]:
            constraint.opened = False
        self._waiting.extend(dict.fromkeys(key for key in lost if key not in self._waiting))
        self._send()

    def _fail(self, keys: Collection[int], why: str) -> None:
        for key in keys:
            constraint = self._known.get(key)
            if constraint is not None:
                constraint.error = why

    def close(self) -> None:
        """End the process, which reads the end of its connection."""
        if self._connection is not None:
            self._engine.unwatch(self._connection)
            self._connection.close()
        self._connection, self._frames, self._started = None, Frames(from_child), False
        self._unsent.clear()
        self._has_unsent = False
        self._unanswered.clear()
        self._held.clear()
        self._opening = None

"""IsolatedConstraints: the constraints of requests whose grammars are followed in other processes, one for each client.

The engine never waits for a grammar. It waits PATIENCE for a mask; a request whose mask is not ready by then draws no
token in the step and takes part in no further one until it is. A process that dies takes no request with it but the one
whose message it could not answer.
"""

import contextlib
import logging
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any
from weakref import WeakValueDictionary, finalize

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from phase0_request import safe_path
from phase0_request.batch import GRAMMAR_FAILED, Forced, Pending
from phase0_request.request import Request
from phase2_prefill_decode.constraints import Constraints, Filled, Follower, StepMasks, fill_masks, words
from phase2_prefill_decode.sampler import Sampler
from phase5_continuous.scheduler import Scheduler
from phase6_integration.grammar_process import (
    OPENING,
    Ask,
    Drop,
    Follows,
    FromChild,
    Leaving,
    Mask,
    Open,
    Spent,
    Started,
    Take,
    ToChild,
    from_child,
)
from phase6_integration.hub import directory_of
from phase6_integration.messages import CHUNK, Frames, frame
from phase6_integration.options import EngineOptions

log = logging.getLogger(__name__)
PATIENCE = 0.01  # seconds that a step waits for masks
TOKENS_PER_SECOND = 1000  # that a tenant is charged with for the processor time of its grammars
CHILDREN = 8  # processes at a time; with more clients than that, some share one
STALLED = 30.0  # seconds without an answer after which a process is killed: if it was stopped, no other limit ends it
FAILED_STARTS = 3  # of a process, in a row: then something else is wrong
TOO_MUCH = f"{GRAMMAR_FAILED}: it took more time or memory than it may use"


# The arenas of malloc, 64 MB of addresses for each thread, would count as memory that a process has taken.
ENVIRONMENT = {"TOKENIZERS_PARALLELISM": "false", "OPENBLAS_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"}


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


class GrammarClient:
    """One process that follows grammars, and its requests, as the engine sees them. One that ends is replaced, and the
    next is told of the requests again.

    A process compiles one grammar at a time: those of requests that end meanwhile are never sent. After one has died
    with several messages to answer, the next gets one at a time, so that it is known which kills it.
    """

    def __init__(self, engine: "IsolatedConstraints", tenant: str) -> None:
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
            while self._unsent:
                del self._unsent[: self._connection.send(self._unsent)]
        except BlockingIOError:
            pass
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
            case Started(pid=pid):
                self._pid, self._started, self._failed_starts = pid, True, 0
            case Spent(seconds=seconds):
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


@dataclass(frozen=True, slots=True)
class IsolatedMasks:
    """The masks of a step. Rows of lists only are filled here, those of grammars in their processes."""

    rows: Sequence[tuple[int, Any, int]]
    numbers: Tensor
    vocab_size: int

    @property
    def in_flight(self) -> bool:
        """As Masks.in_flight."""
        return any(index > len(constraint.output) for _, constraint, index in self.rows)

    def start(self) -> "IsolatedMasks":
        """Have them made, and `result` collects them. Mostly they are on their way since the token before was taken."""
        for _, constraint, index in self.rows:
            if isinstance(constraint, IsolatedConstraint):
                constraint.ask(index)
        return self

    def result(self) -> Filled:
        return self.filled()

    def filled(self) -> Filled:
        """The masks that are ready, and the rows whose masks are not: these have no bits."""
        started = time.monotonic()
        self.start()
        bits, late = np.zeros((len(self.rows), words(self.vocab_size)), np.uint32), dict[int, Pending]()
        for number, (row, constraint, index) in enumerate(self.rows):
            if not isinstance(constraint, IsolatedConstraint):
                bits[number] = fill_masks([(constraint, index)], self.vocab_size)[0]
                continue
            mask = constraint.mask(index, started)
            if mask is not None:
                bits[number] = mask
            elif constraint.error is None:
                late[row] = constraint
        return Filled(torch.from_numpy(bits.view(np.int32)), late)


class IsolatedConstraints(Constraints):
    """Makes the constraints of requests in processes, which it starts when the first grammar comes."""

    def __init__(self, vocab_size: int, directory: str, eos_ids: Collection[int]) -> None:
        super().__init__(vocab_size, None)
        self._arguments = [directory, str(vocab_size), *map(str, sorted(eos_ids))]
        self._parent: tuple[subprocess.Popen[bytes], socket.socket] | None = None
        self._selector = selectors.DefaultSelector()
        self._clients: list[GrammarClient] = []  # the latest last
        self._keys = count()
        self._ended: deque[tuple[GrammarClient, int]] = deque()
        self._seconds: dict[str, float] = defaultdict(float)  # that grammars have taken, by tenant, not charged yet

    def of(self, request: Request) -> Follower:
        """A request's constraint. Its grammar is compiled from now on."""
        if request.params.grammar is None:
            return super().of(request)
        client, key = self._client_of(request.tenant), next(self._keys)
        constraint = IsolatedConstraint(key, request, client)
        client.add(constraint, request.tenant)
        constraint.ask(0)
        finalize(request, self._ended.append, (client, key)).atexit = False
        return constraint

    def masks(self, rows: Sequence[tuple[int, Any, int]], numbers: Tensor) -> StepMasks:
        return IsolatedMasks(rows, numbers, self.vocab_size)

    def fileno(self) -> int:
        """A descriptor that is readable when an answer has come."""
        return self._selector.fileno()

    def receive(self, timeout: float) -> None:
        """Read answers, and wait for them so many seconds if there is none."""
        while self._ended:
            client, key = self._ended.popleft()
            client.drop(key)
        for client in self._clients:
            client.check(time.monotonic())
        for registered, events in self._selector.select(timeout):
            if events & selectors.EVENT_WRITE:
                registered.data.flush()
            if events & selectors.EVENT_READ:
                registered.data.read()

    def spent(self, client: GrammarClient, seconds: float) -> None:
        """Note the processor time of masks: all requests of the process have an equal share in it."""
        for tenant in client.tenants:
            self._seconds[tenant] += seconds / len(client)

    def take_seconds(self) -> Mapping[str, float]:
        """The processor time of each tenant's grammars since the last call."""
        taken, self._seconds = self._seconds, defaultdict(float)
        return taken

    # Processes.

    def _client_of(self, tenant: str) -> GrammarClient:
        """The process of a tenant. With too many of them, the idle one that is longest so is ended for it, or one is
        shared."""
        clients = self._clients
        client = next((one for one in clients if one.tenant == tenant), None)
        if client is None and len(clients) >= CHILDREN:
            idle = next((one for one in clients if not len(one)), None)
            if idle is None:
                return min(clients, key=len)
            idle.close()
            clients.remove(idle)
        if client is None:
            client = GrammarClient(self, tenant)
        else:
            clients.remove(client)
        clients.append(client)
        return client

    def connect(self, client: GrammarClient) -> socket.socket:
        """Have a child forked, and connect to it."""
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        with theirs:
            try:
                socket.send_fds(self._connection(), [b"\0"], [theirs.fileno()])
            except OSError:  # the parent has ended: the next one is started for the next child
                self._stop()
        self.register(ours, client)
        return ours

    def register(self, connection: socket.socket, client: GrammarClient) -> None:
        self._selector.register(connection, selectors.EVENT_READ, client)

    def _connection(self) -> socket.socket:
        if self._parent is None:
            ours, theirs = socket.socketpair()
            with theirs:
                command = [sys.executable, "-m", "phase6_integration.grammar_process", str(theirs.fileno())]
                process = subprocess.Popen(
                    [*command, *self._arguments],
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    process_group=0,  # so that Ctrl-C reaches the server only
                    env={**safe_path.environment(), **ENVIRONMENT},
                )
            self._parent = process, ours
        return self._parent[1]

    def watch(self, connection: socket.socket, client: GrammarClient, writes: bool) -> None:
        self._selector.modify(connection, selectors.EVENT_READ | (selectors.EVENT_WRITE if writes else 0), client)

    def unwatch(self, connection: socket.socket) -> None:
        self._selector.unregister(connection)

    def close(self) -> None:
        """End all processes."""
        for client in self._clients:
            client.close()
        self._stop()

    def _stop(self) -> None:
        """End the parent of the processes, which forks no more."""
        if self._parent is not None:
            process, connection = self._parent
            self._parent = None
            connection.close()
            process.kill()
            process.wait()


class IsolatedGrammars:
    """The work for grammars beside the steps: they are compiled while their requests wait, and charged."""

    def __init__(self, sampler: Sampler, options: EngineOptions) -> None:
        """Have a sampler follow grammars in processes from now on."""
        directory = directory_of(options.tokenizer or options.model, options.revision, options.download_dir)
        self.constraints = IsolatedConstraints(sampler.vocab_size, str(directory), sampler.eos_ids)
        sampler.constraints = self.constraints
        self.fileno = self.constraints.fileno
        self.prepare = sampler.constraint_of

    def receive(self, scheduler: Scheduler) -> None:
        """Read the answers that have come, and charge tenants for the time of their grammars."""
        self.constraints.receive(0)
        for tenant, seconds in self.constraints.take_seconds().items():
            scheduler.charge(tenant, seconds * TOKENS_PER_SECOND)

"""GrammarProcess: the engine's end of the process that compiles and follows the grammars of all clients."""

import contextlib
import logging
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from weakref import WeakValueDictionary

import msgspec

from phase0_request.params import GRAMMAR_FAILED
from phase0_request.support import entry
from phase6_integration.extras.structured import grammar_worker
from phase6_integration.extras.structured.grammar_worker import COMPILING, Answers, FollowBatch, from_worker
from phase6_integration.extras.structured.isolated_constraint import IsolatedConstraint
from phase6_integration.process.messages import Channel

log = logging.getLogger(__name__)
PATIENCE = 0.01  # seconds that a step waits for masks
SILENT = (
    120.0  # seconds without an answer after which the process is killed: a start takes some, a stopped one has no end
)
STARTS = 3  # that fail in a row, before the requests that wait do
KILLS = 2  # by SIGKILL, before the grammar that the process had alone is blamed
TOO_MUCH = f"{GRAMMAR_FAILED}: it took more time or memory than it may use"
NOT_STARTED = "the process that follows grammars cannot be started"

# More arenas of malloc, 64 MB of addresses for each thread, would count as memory that a grammar has taken.
ENVIRONMENT = {"OPENBLAS_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"}

Start = Callable[[], tuple["subprocess.Popen[bytes]", socket.socket]]


def start_worker(
    directory: str, vocab_size: int, eos_ids: Collection[int]
) -> tuple["subprocess.Popen[bytes]", socket.socket]:
    """Start a process and connect to it. OSError if none can be started."""
    ours, theirs = socket.socketpair()
    code = f"from {grammar_worker.__name__} import run; run({directory!r}, {vocab_size}, {sorted(eos_ids)})"
    environment = {**entry.environment(), **ENVIRONMENT}
    with theirs:
        try:
            process = subprocess.Popen(
                [sys.executable, "-c", code],
                stdin=theirs.fileno(),
                process_group=0,  # so that Ctrl-C reaches the owner only
                env=environment,
            )
        except OSError:
            ours.close()
            raise
    return process, ours


class GrammarProcess:
    """Sends the process what requests need, and starts another when it has ended.

    It sends a batch once the previous one is answered: either everything that waits for requests the process knows, or
    one request that it does not know. A request that has ended in the meantime is in no batch.

    If the process dies, its successor gets the requests of the last batch one by one, and the one that ends it again
    fails. Together they may have taken too long although each alone does not. Half of the time is reserved for requests
    that have had a mask, so new grammars, however bad, cannot stop those that run.
    """

    def __init__(self, start: Start, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.patience = PATIENCE  # 0 after masks that took longer than that
        self.failed: list[IsolatedConstraint] = []  # their requests are to be ended
        self.seconds = defaultdict[str, float](float)  # of processor time, by tenant, not charged yet
        self._start = start
        self._selector = selectors.DefaultSelector()
        self._running: tuple[subprocess.Popen[bytes], Channel] | None = None
        self._has_begun = False
        self._failed_starts = 0  # in a row
        self._requests: WeakValueDictionary[int, IsolatedConstraint] = WeakValueDictionary()
        self._waiting: list[int] = []  # keys of the requests to be sent
        self._known: set[int] = set()  # keys of the requests that the process has been sent
        self._batch: dict[int, str] = {}  # keys of the requests that it is to answer, and their tenants
        self._since = 0.0  # when the batch was sent, or when the process has begun with it
        self._compiles = False  # the batch is a new grammar
        self._last_tenant = ""  # the client of the latest new grammar
        self._compile_from = 0.0  # when the next new grammar may be compiled

    def fileno(self) -> int:
        """A descriptor that becomes readable when an answer arrives."""
        return self._selector.fileno()

    def add(self, constraint: IsolatedConstraint) -> None:
        """Send what is new about a request at the next `poll`."""
        self._requests[constraint.key] = constraint
        if constraint.key not in self._waiting and constraint.error is None:
            self._waiting.append(constraint.key)

    def wait(self, done: Callable[[], bool], deadline: float) -> None:
        """Send and receive until `done`, or until the deadline. Data that has arrived is read in any case."""
        while not done():
            left = deadline - self.clock()
            self.poll(max(left, 0.0))
            if left <= 0:
                return

    def poll(self, timeout: float = 0.0) -> None:
        """Send what waits and read answers; wait up to this many seconds if there is none."""
        self._send()
        if self._waiting and not self._batch:  # a new grammar, for which it is too early
            timeout = min(timeout, max(self._compile_from - self.clock(), 0.0))
        if self._selector.select(timeout):
            self._read()
            self._send()

    def _send(self) -> None:
        """Send a batch, if the previous one is answered."""
        if self._batch:
            if self.clock() - self._since > SILENT:
                log.warning("the process that follows grammars has not answered in %d seconds: it is killed", SILENT)
                self._ended()
            return
        requests = {**self._requests}
        self._waiting = [key for key in self._waiting if key in requests]
        ended = self._known - requests.keys()
        batch = self._next_batch(requests)
        if not (batch or ended):
            return
        try:
            channel = self._connected()
        except OSError:  # too many open files, say
            self._ended()
            return
        self._batch, self._since = {key: requests[key].tenant for key in batch}, self.clock()
        self._compiles = any(not requests[key].is_compiled for key in batch)
        follow = [requests[key].message(key not in self._known) for key in batch]
        self._known = (self._known - ended) | {*batch}
        self._waiting = [key for key in self._waiting if key not in self._batch]
        with contextlib.suppress(ConnectionError):  # it has ended: that is read next
            channel.send(FollowBatch(follow, [*ended]))

    def _next_batch(self, requests: Mapping[int, IsolatedConstraint]) -> list[int]:
        """The keys of the next batch. Clients take turns with new grammars."""
        compiled = [key for key in self._waiting if requests[key].is_compiled]
        new = [key for key in self._waiting if not requests[key].is_compiled]
        is_paused = self.clock() < self._compile_from and any(one.is_compiled for one in requests.values())
        if not new or is_paused:
            known = [key for key in compiled if key in self._known] or compiled[:1]
            together = [key for key in known if not requests[key].is_suspect]
            return known[:1] if known[:1] != together[:1] else together
        self._waiting.sort(key=lambda key: requests[key].tenant == self._last_tenant)
        first = next(key for key in self._waiting if key in new)
        self._last_tenant = requests[first].tenant
        return [first]

    def _pause(self) -> None:
        """Compile no new grammar for as long as this batch took."""
        now = self.clock()
        self._compile_from = max(self._compile_from, now + (now - self._since))

    def _connected(self) -> Channel:
        if self._running is None:
            process, connection = self._start()
            self._running = process, Channel(connection, from_worker)
            self._selector.register(self._running[1], selectors.EVENT_READ)
        return self._running[1]

    def _read(self) -> None:
        """Read the answers that have arrived, or notice that the process has ended."""
        assert self._running is not None
        try:
            for answers in self._running[1].receive(wait=False):
                self._receive(answers)
        except (EOFError, OSError, ValueError, msgspec.MsgspecError):  # it has ended, or writes what is no message
            self._ended()

    def _receive(self, answers: Answers) -> None:
        """Pass on answers."""
        if not self._has_begun:
            self._has_begun, self._since, self._failed_starts = True, self.clock(), 0
        for key in self._batch:
            if (request := self._requests.get(key)) is not None:
                if key in answers.forced:
                    request.receive_forced(answers.forced[key])
                if key in answers.masks:
                    request.receive_masks(answers.masks[key])
        self._fail(answers.errors)
        if answers.seconds:
            self._charge(self._batch, answers.seconds)
            self.patience = 0.0 if answers.seconds > PATIENCE else PATIENCE
        if answers.masks or answers.errors:
            self._batch = {}
            if self._compiles:
                self._pause()

    def _ended(self) -> None:
        """The process has ended, was given up, or cannot be started. If it had only one request to answer, that may
        be the reason."""
        batch, has_begun, code = self._batch, self._has_begun, self.close()
        self._waiting = [*dict.fromkeys([*batch, *self._waiting])]
        if not has_begun:
            self._failed_starts += 1
            if self._failed_starts == STARTS:
                self._failed_starts = 0
                self._fail(dict.fromkeys(self._waiting, NOT_STARTED))
        elif batch and code:  # 0: it had grown too large
            self._pause()
            self._charge(batch, COMPILING)  # at most: it did not say
            for suspect in filter(None, map(self._requests.get, batch)):
                suspect.is_suspect = True
                if len(batch) > 1:
                    continue
                suspect.kills += 1 if code == -signal.SIGKILL else KILLS  # the system sends SIGKILL, too
                if suspect.kills >= KILLS:
                    log.warning("a grammar ended the process that follows grammars")
                    self._fail({suspect.key: TOO_MUCH})

    def _fail(self, errors: Mapping[int, str]) -> None:
        """End requests with these errors."""
        for key, error in errors.items():
            if (request := self._requests.get(key)) is not None:
                request.fail(error)
                self.failed.append(request)
        self._waiting = [key for key in self._waiting if key not in errors]

    def _charge(self, batch: Mapping[int, str], seconds: float) -> None:
        """Charge clients for processor time, shared equally by the requests of the batch."""
        for tenant in batch.values():
            self.seconds[tenant] += seconds / len(batch)

    def close(self) -> int:
        """End the process. Returns its exit code: above 0 if it failed, or the negative number of a signal."""
        code = 0
        if self._running is not None:
            process, channel = self._running
            self._selector.unregister(channel)
            channel.close()
            process.kill()  # unless it has ended
            code = process.wait()
        self._running, self._has_begun, self._known, self._batch = None, False, set(), {}
        return code

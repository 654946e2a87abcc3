"""IsolatedProcess: the engine's end of a process that follows grammars. IsolatedConstraint: one request there."""

import contextlib
import logging
import selectors
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from weakref import WeakValueDictionary, ref

import msgspec
import numpy as np
from numpy.typing import NDArray

from phase0_request.params import GRAMMAR_FAILED
from phase0_request.request import Request
from phase2_prefill_decode.extras.outcome import Forced
from phase6_integration.extras.structured.grammar_process import COMPILING, Answers, Follow, FollowBatch, from_child
from phase6_integration.extras.structured.grammar_server import GrammarServer
from phase6_integration.process.messages import Channel

log = logging.getLogger(__name__)
PATIENCE = 0.01  # seconds that a step waits for masks
STALLED = 30.0  # seconds without an answer after which a process is given up: if it was stopped, no limit ends it
STARTING = 120.0  # the same, of a server that has not answered yet: it imports, and reads the vocabulary
FAILED_STARTS = 3  # of a process, in a row: then something else is wrong
DEATHS = 2  # of processes, before the grammar that each had alone is blamed
TOO_MUCH = f"{GRAMMAR_FAILED}: it took more time or memory than it may use"
NOT_STARTED = "the process that follows grammars cannot be started"


class IsolatedConstraint:
    """One request's constraint. It knows the output that its process has been asked to follow, and the answers."""

    def __init__(self, key: int, request: Request, process: "IsolatedProcess") -> None:
        self.key = key
        self.request = ref(request)
        self.tenant = request.tenant
        self.params = request.params
        self.output: Sequence[int] = request.output_tokens  # committed
        self.error: str | None = None
        self.deaths = 0  # of processes that had this request alone to answer
        self._process = process
        self._followed: list[int] = []  # the output up to the mask: what is drawn, and what that forces
        self._sent = 0  # tokens of that which the process has been sent
        self._drawn: tuple[int, int] | None = None  # the last of it, if what it forces is asked for: index and token
        self._forced: Forced | None = None  # the answer to that
        self._draft: list[int] = []  # behind what is followed
        self._asked: list[int] | None = None  # the draft that the next answer is about; None: it is outdated
        self._masks: NDArray[np.uint32] | None = None  # [1, or 1 + tokens of the draft, words]
        self._deadline = 0.0  # until when a step waits for the forced tokens
        self._follow(0, ())

    def take(self, index: int, token: int) -> None:
        """As Constraint.take."""
        if index >= len(self.output) and self._drawn != (index, token):
            self._follow(index, [token], (index, token))

    def forced(self, index: int) -> Forced | None:
        """As Constraint.forced. None also if the answer has not come in time: then forced tokens are drawn."""
        if self._drawn is None or self._drawn[0] != index:
            return None
        self._process.wait(lambda: self._forced is not None or self.error is not None, self._deadline)
        return self._forced if self._forced and (self._forced.tokens or self._forced.ends) else None

    def ask(self, index: int) -> bool:
        """Have the mask of an output token made, unless it is there or will come. False if it cannot be made yet."""
        known = len(self._followed)
        if index > max(known, len(self.output)):
            return False  # it depends on a token that was not drawn
        if index != known:
            start = min(index, known)
            self._follow(start, self.output[start:index])
        return True

    def verify(self, draft: Sequence[int]) -> None:
        """Have the masks behind each token of a draft made, too. The draft before is forgotten."""
        if [*draft] != self._draft:
            self._draft = [*draft]
            self._masks = None if self._masks is None else self._masks[:1]
            if draft:
                self._process.add(self)

    def masks(self, index: int, draft: Sequence[int], started: float) -> NDArray[np.uint32] | None:
        """The mask of an output token and those behind a draft, waited for as long as a step may that began to wait
        then. Those behind the draft are missing if they are late. None: the first is late."""
        deadline = started + self._process.patience
        self._process.wait(lambda: not self.ask(index) or self._is_ready(index, 1 + len(draft)), deadline)
        return self._masks if self._is_ready(index) else None

    def done(self) -> bool:
        """Whether the mask of the next token of the output is ready, or will never be."""
        return self.ask(len(self.output)) and self._is_ready(len(self.output))

    def _is_ready(self, index: int, masks: int = 1) -> bool:
        known = 0 if self._masks is None or len(self._followed) != index else len(self._masks)
        return self.error is not None or known >= masks

    def _follow(self, start: int, tokens: Iterable[int], drawn: tuple[int, int] | None = None) -> None:
        self._followed[start:] = tokens
        self._sent = min(self._sent, start)
        self._drawn, self._forced, self._draft, self._asked, self._masks = drawn, None, [], None, None
        self._deadline = time.monotonic() + self._process.patience
        self._process.add(self)

    # What the process is sent, and what it answers.

    def message(self, is_new: bool) -> Follow:
        """What the process does not know yet. `is_new`: it does not know the request."""
        start, self._sent, self._asked = 0 if is_new else self._sent, len(self._followed), self._draft
        asks = self._drawn is not None and self._forced is None
        return Follow(self.key, start, self._followed[start:], asks, self._draft, self.params if is_new else None)

    def receive_forced(self, forced: Forced) -> None:
        if self._asked is None:
            return
        self._forced = Forced(tuple(forced.tokens), forced.ends)
        self._followed += forced.tokens
        self._sent = len(self._followed)

    def receive_masks(self, bits: bytes) -> None:
        if self._asked is not None:
            masks = np.frombuffer(bits, np.uint32).reshape(1 + len(self._asked), -1)
            self._masks = masks if self._asked == self._draft else masks[:1]

    def fail(self, error: str) -> None:
        self.error, self._masks = error, None


class IsolatedProcess:
    """The engine's end of one process: one client's, and with too many clients, several clients'.

    It gets a batch when it has answered the one before: either all that waits of requests that it knows, or one request
    that it does not know, so that it compiles one grammar at a time. A request that has ended meanwhile is in no batch.
    If a process dies, its successor knows no request, and so gets them one by one: the one that kills DEATHS of them
    fails. One death says little: the system ends processes too, as when its memory runs out.
    """

    def __init__(self, server: GrammarServer, selector: selectors.BaseSelector, poll: Callable[[float], None]) -> None:
        """`poll` waits for answers at `selector`, so many seconds, and has them read."""
        self.patience = PATIENCE  # 0 after masks that took longer than that
        self.failed: list[IsolatedConstraint] = []  # whose requests are to be ended
        self.seconds = defaultdict[str, float](float)  # of processor time, by tenant, not charged yet
        self._server, self._selector, self._poll = server, selector, poll
        self._requests: WeakValueDictionary[int, IsolatedConstraint] = WeakValueDictionary()
        self._waiting: list[int] = []  # keys of the requests to be sent
        self._compiles = False  # the last batch was a request that was new
        self._failed_starts = 0  # in a row
        self._channel: Channel | None = None
        self._known: set[int] = set()  # keys of the requests that the process has been sent
        self._batch: list[int] = []  # keys of the requests that it is to answer
        self._has_begun = False
        self._since = 0.0  # when it last answered, or was sent a batch

    def __len__(self) -> int:
        return len(self._requests)

    def add(self, constraint: IsolatedConstraint) -> None:
        """Have what is new of a request sent by the next `send`."""
        self._requests[constraint.key] = constraint
        if constraint.key not in self._waiting and constraint.error is None:
            self._waiting.append(constraint.key)

    def wait(self, done: Callable[[], bool], deadline: float) -> None:
        """Send and receive until `done`, or until the deadline. What has arrived is read in any case."""
        while not done():
            left = deadline - time.monotonic()
            self._poll(max(left, 0.0))
            if left <= 0:
                return

    def send(self) -> None:
        """Send a batch, if the one before is answered."""
        if self._batch:
            patience = STALLED if self._server.has_answered else STARTING
            if time.monotonic() - self._since > patience:
                if not self._has_begun:
                    log.warning("no answer of the server of grammars in %d seconds: another is started", patience)
                    self._server.close()  # it is what was stopped: the next connection starts another
                self._end()
            return
        requests = {**self._requests}
        self._waiting = [key for key in self._waiting if key in requests]
        ended = self._known - requests.keys()
        if not (self._waiting or ended):
            return
        try:
            channel = self._connected()
        except OSError:  # too many open files, say
            self._end()
            return
        self._batch = self._next_batch(requests)
        follow = [requests[key].message(key not in self._known) for key in self._batch]
        self._known = (self._known - ended) | {*self._batch}
        self._waiting = [key for key in self._waiting if key not in self._batch]
        self._since = time.monotonic()
        with contextlib.suppress(ConnectionError):  # it has ended: that is read next
            channel.send(FollowBatch(follow, [*ended]))

    def _next_batch(self, requests: Mapping[int, IsolatedConstraint]) -> list[int]:
        """The keys of the next batch. Known requests and new ones take turns, and so do the clients of new ones."""
        known = [key for key in self._waiting if key in self._known]
        new = [key for key in self._waiting if key not in self._known]
        self._compiles = bool(new) and not (known and self._compiles)
        if not self._compiles:
            return known
        tenant = requests[new[0]].tenant
        self._waiting.sort(key=lambda key: requests[key].tenant == tenant)
        return new[:1]

    def _connected(self) -> Channel:
        if self._channel is None:
            self._channel, self._has_begun = Channel(self._server.connect(), from_child), False
            self._selector.register(self._channel, selectors.EVENT_READ, self)
        return self._channel

    def read(self) -> None:
        """Read the answers that have come, or that the process has ended."""
        assert self._channel is not None
        try:
            for answers in self._channel.receive(wait=False):
                self._receive(answers)
        except (EOFError, OSError, ValueError, msgspec.MsgspecError):  # it has ended, or writes what is no message
            self._end()
        self.send()

    def _receive(self, answers: Answers) -> None:
        """Pass on answers."""
        self._since, self._has_begun, self._failed_starts = time.monotonic(), True, 0
        self._server.has_answered = True
        for key in self._batch:
            if (request := self._requests.get(key)) is not None:
                if key in answers.forced:
                    request.receive_forced(answers.forced[key])
                if key in answers.masks:
                    request.receive_masks(answers.masks[key])
        self._fail(answers.errors)
        if answers.seconds:
            self._charge(answers.seconds)
            self.patience = 0.0 if answers.seconds > PATIENCE else PATIENCE
        if answers.masks or answers.errors:
            self._batch = []
        if answers.leaves:
            self.close()

    def _end(self) -> None:
        """The process has ended, is given up, or cannot be started. If it had one request to answer, that may be the
        reason."""
        batch, has_begun = self._batch, self._has_begun
        self.close()
        self._waiting = [*dict.fromkeys([*batch, *self._waiting])]
        if not has_begun:
            self._failed_starts += 1
            if self._failed_starts >= FAILED_STARTS:
                self._fail(dict.fromkeys(self._waiting, NOT_STARTED))
        elif batch:
            self._charge(COMPILING)  # at most: it did not say
            if len(batch) == 1 and (suspect := self._requests.get(batch[0])) is not None:
                suspect.deaths += 1
                if suspect.deaths == DEATHS:
                    log.warning("a grammar ended %d processes that followed it", DEATHS)
                    self._fail({suspect.key: TOO_MUCH})

    def _fail(self, errors: Mapping[int, str]) -> None:
        """Have requests end with these errors."""
        for key, error in errors.items():
            if (request := self._requests.get(key)) is not None:
                request.fail(error)
                self.failed.append(request)
        self._waiting = [key for key in self._waiting if key not in errors]

    def _charge(self, seconds: float) -> None:
        """Charge clients for processor time: each request has an equal share in it."""
        requests = [*self._requests.values()]
        for request in requests:
            self.seconds[request.tenant] += seconds / len(requests)

    def close(self) -> None:
        """End the process, which reads the end of its connection."""
        if self._channel is not None:
            self._selector.unregister(self._channel)
            self._channel.close()
        self._channel, self._has_begun, self._known, self._batch = None, False, set(), []

"""IsolatedConstraint: the engine's end of a constraint that another process follows."""

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol
from weakref import ref

import numpy as np
from numpy.typing import NDArray

from phase0_request.request import Request
from phase2_prefill_decode.extras.outcome import Forced
from phase6_integration.extras.structured.grammar_worker import Follow


class Process(Protocol):
    """The process that follows a constraint (`grammar_process`)."""

    patience: float  # seconds that a step waits for masks
    clock: Callable[[], float]

    def add(self, constraint: "IsolatedConstraint") -> None: ...

    def wait(self, done: Callable[[], bool], deadline: float) -> None: ...


class IsolatedConstraint:
    """One request's constraint: the output that its process was asked to follow, and the answers."""

    def __init__(self, key: int, request: Request, process: Process) -> None:
        self.key = key
        self.request = ref(request)
        self.tenant = request.tenant
        self.params = request.params
        self.output: Sequence[int] = request.output_tokens  # committed
        self.error: str | None = None
        self.is_compiled = False  # it has had a mask, and has not failed
        self.kills = 0  # processes that ended while they had this request alone to answer
        self.is_suspect = False  # a process ended while it had this request and others: it is asked alone from then on
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
        """Like Constraint.take."""
        if index >= len(self.output) and self._drawn != (index, token):
            self._follow(index, [token], (index, token))

    def forced(self, index: int) -> Forced | None:
        """Like Constraint.forced. Also None if the answer is late; then forced tokens are drawn."""
        if self._drawn is None or self._drawn[0] != index:
            return None
        self._process.wait(lambda: self._forced is not None or self.error is not None, self._deadline)
        return self._forced if self._forced and (self._forced.tokens or self._forced.ends) else None

    def ask(self, index: int) -> bool:
        """Have the mask of an output token made, unless it is there or on its way. False if it cannot be made yet."""
        known = len(self._followed)
        if index > max(known, len(self.output)):
            return False  # it depends on a token that was not drawn
        if index != known:
            start = min(index, known)
            self._follow(start, self.output[start:index])
        return True

    def verify(self, draft: Sequence[int]) -> None:
        """Also have the masks after each token of a draft made. The previous draft is forgotten."""
        if [*draft] != self._draft:
            self._draft = [*draft]
            self._masks = None if self._masks is None else self._masks[:1]
            if draft:
                self._process.add(self)

    def masks(self, index: int, draft: Sequence[int], started: float) -> NDArray[np.uint32] | None:
        """The mask of an output token and those after a draft. Waits as long as a step that began to wait then may.
        If only those after the draft are late, they are missing; None if the first is late."""
        deadline = started + self._process.patience
        self._process.wait(lambda: not self.ask(index) or self._is_ready(index, 1 + len(draft)), deadline)
        return self._masks if self._is_ready(index) else None

    def done(self) -> bool:
        """Whether the mask of the output's next token is ready, or will never be."""
        return self.ask(len(self.output)) and self._is_ready(len(self.output))

    def _is_ready(self, index: int, masks: int = 1) -> bool:
        known = 0 if self._masks is None or len(self._followed) != index else len(self._masks)
        return self.error is not None or known >= masks

    def _follow(self, start: int, tokens: Iterable[int], drawn: tuple[int, int] | None = None) -> None:
        self._followed[start:] = tokens
        self._sent = min(self._sent, start)
        self._drawn, self._forced, self._draft, self._asked, self._masks = drawn, None, [], None, None
        self._deadline = self._process.clock() + self._process.patience
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
        self.is_compiled = True
        if self._asked is not None:
            masks = np.frombuffer(bits, np.uint32).reshape(1 + len(self._asked), -1)
            self._masks = masks if self._asked == self._draft else masks[:1]

    def fail(self, error: str) -> None:
        self.error, self._masks, self.is_compiled = error, None, False

"""Request: a list of tokens and a count of how many have been computed. Everything the engine does is catching up."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from phase0_request.logprobs import TokenLogprobs
from phase0_request.params import SamplingParams
from phase0_request.times import RequestTimes

MAX_PRIORITY = 1 << 31
MAX_SALT = 256  # characters


class RequestState(Enum):
    WAITING = "waiting"  # submitted, holds no memory
    RUNNING = "running"  # takes part in steps
    PREEMPTED = "preempted"  # ran, lost its memory, waits to run again
    FINISHED = "finished"


class FinishReason(Enum):
    STOP = "stop"  # an end-of-sequence token, a stop token or a stop string
    LENGTH = "length"  # max_tokens, or the end of the context
    ABORT = "abort"  # the client left
    ERROR = "error"  # this request could not be served; `Request.error` says why
    TIMEOUT = "timeout"  # its deadline passed


class InvalidTransitionError(RuntimeError):
    """A request was asked for a step that its state does not allow: a fault of the engine, never of the client."""

    def __init__(self, request: "Request", action: str, why: str) -> None:
        super().__init__(f"request {request.id} ({request.state.value}) cannot {action}: {why}")


@dataclass(slots=True, eq=False)
class Request:
    """One prompt on its way to an answer.

    `computed` counts the tokens whose keys and values exist; `total` counts the tokens that are known. While
    `computed < total` there is work. When the two meet, the model has just predicted one more token: `append` it,
    and the chase goes on until `finish`.

            admit            preempt
    WAITING -----> RUNNING <---------> PREEMPTED       finish(reason) leads from each of them to FINISHED;
                              admit                    abort() may be called in any state.
    """

    id: str
    prompt_tokens: tuple[int, ...]
    params: SamplingParams = field(default_factory=SamplingParams)
    priority: int = 0  # lower runs earlier
    arrival: float = 0.0
    cache_salt: str = ""  # requests share computed tokens only with those of the same salt
    output_tokens: list[int] = field(default_factory=list, init=False)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list, init=False)  # if asked: of all but the first
    computed: int = field(default=0, init=False)
    state: RequestState = field(default=RequestState.WAITING, init=False)
    finish_reason: FinishReason | None = field(default=None, init=False)
    error: str | None = field(default=None, init=False)
    times: RequestTimes = field(init=False)

    def __post_init__(self) -> None:
        self.prompt_tokens = tuple(self.prompt_tokens)
        if not self.prompt_tokens:
            raise ValueError(f"request {self.id}: the prompt is empty; at least one token is needed")
        for token in self.prompt_tokens:
            if type(token) is not int or token < 0:
                raise ValueError(f"request {self.id}: a prompt token must be an integer from 0, got {token!r}")
        if type(self.priority) is not int or abs(self.priority) > MAX_PRIORITY:
            allowed = f"an integer from {-MAX_PRIORITY} to {MAX_PRIORITY}"
            raise ValueError(f"request {self.id}: priority must be {allowed}, got {self.priority!r:.80}")
        if type(self.arrival) is bool or not isinstance(self.arrival, int | float) or not abs(self.arrival) < math.inf:
            raise ValueError(f"request {self.id}: arrival must be a finite number of seconds, got {self.arrival!r:.80}")
        if not isinstance(self.cache_salt, str) or len(self.cache_salt) > MAX_SALT:
            given = f"{len(self.cache_salt)} of them" if isinstance(self.cache_salt, str) else repr(self.cache_salt)
            raise ValueError(
                f"request {self.id}: cache_salt must be a string of at most {MAX_SALT} characters, got {given:.80}"
            )
        self.times = RequestTimes(self.arrival)

    @property
    def total(self) -> int:
        return len(self.prompt_tokens) + len(self.output_tokens)

    @property
    def finished(self) -> bool:
        return self.state is RequestState.FINISHED

    @property
    def settled(self) -> int:
        """How many of its first tokens it may take as computed by others: all, unless its prompt is to be scored. Then
        those whose scores are known."""
        known, wanted = len(self.prompt_logprobs), len(self.prompt_tokens) - 1
        return known if self.params.prompt_logprobs is not None and known < wanted else self.total

    def tokens(self, start: int, stop: int) -> list[int]:
        """The known tokens from position `start` up to `stop`, over prompt and output as one sequence."""
        if not 0 <= start <= stop <= self.total:
            raise IndexError(f"request {self.id} has tokens 0 to {self.total}, not {start} to {stop}")
        split = len(self.prompt_tokens)
        return [*self.prompt_tokens[start:stop], *self.output_tokens[max(start - split, 0) : max(stop - split, 0)]]

    def admit(self, now: float) -> None:
        if self.state is not RequestState.WAITING and self.state is not RequestState.PREEMPTED:
            raise InvalidTransitionError(self, "be admitted", "only a waiting or preempted request can")
        self.state = RequestState.RUNNING
        self.times.admit(now)

    def advance(self, start: int, length: int) -> None:
        """The tokens from `start` on, `length` of them, have been computed. They begin where it left off."""
        # region exercise 0.1
        stop = start + length
        if self.state is not RequestState.RUNNING:
            raise InvalidTransitionError(self, f"advance from {start} to {stop}", "it is not running")
        if start != self.computed or not start < stop <= self.total:
            done = f"{self.computed} of {self.total} are computed"
            raise InvalidTransitionError(self, f"advance from {start} to {stop}", done)
        self.computed = stop
        # endregion

    def score(self, start: int, found: Sequence[TokenLogprobs]) -> None:
        """What the model found of the prompt tokens after position `start`. After a preemption it says it again."""
        known = len(self.prompt_logprobs)
        if start > known or start + len(found) >= len(self.prompt_tokens):
            given = f"scores {start + 1} to {start + len(found)}"
            why = f"{known} are known, and its prompt has {len(self.prompt_tokens)} tokens"
            raise InvalidTransitionError(self, f"take {given}", why)
        self.prompt_logprobs += found[known - start :]

    def append(self, token: int, now: float) -> None:
        """The model has seen every token there is and predicted the next one."""
        if self.state is not RequestState.RUNNING:
            raise InvalidTransitionError(self, f"take token {token}", "it is not running")
        if self.computed != self.total:
            raise InvalidTransitionError(self, f"take token {token}", f"{self.computed} of {self.total} are computed")
        self.output_tokens.append(token)
        self.times.token(now)

    def preempt(self) -> None:
        """Its memory is taken: nothing of it is computed any more, and what it has said is kept."""
        if self.state is not RequestState.RUNNING:
            raise InvalidTransitionError(self, "be preempted", "it is not running")
        self.state = RequestState.PREEMPTED
        self.computed = 0

    def finish(self, reason: FinishReason, now: float, error: str | None = None) -> None:
        """End here. STOP and LENGTH are said of one that has run: it may have been preempted before a stop string was
        found in its text. ERROR and TIMEOUT can meet it anywhere."""
        if self.state is RequestState.FINISHED:
            raise InvalidTransitionError(self, f"finish ({reason.value})", f"it did already ({self._reason})")
        if reason in (FinishReason.STOP, FinishReason.LENGTH) and self.state is RequestState.WAITING:
            raise InvalidTransitionError(self, f"finish ({reason.value})", "it has not run")
        if (error is not None) != (reason is FinishReason.ERROR):
            raise ValueError(f"request {self.id}: an error message goes with reason error, and only with it")
        self.state = RequestState.FINISHED
        self.finish_reason = reason
        self.error = error
        self.times.finish(now)

    def stop_after_all(self) -> None:
        """The text of its last token turned out to complete a stop string: that is why it ended, not its length."""
        if self.finish_reason is not FinishReason.LENGTH:
            raise InvalidTransitionError(self, "have stopped after all", f"it ended by {self._reason}, not by length")
        self.finish_reason = FinishReason.STOP

    def abort(self, now: float) -> bool:
        """Legal in every state. True if this ended the request, False if it had ended before."""
        if self.state is RequestState.FINISHED:
            return False
        self.finish(FinishReason.ABORT, now)
        return True

    @property
    def _reason(self) -> str:
        return self.finish_reason.value if self.finish_reason else "no reason"

"""Request: a list of tokens and a count of how many have been computed. Serving a request means catching up."""

from collections.abc import MutableSequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from phase0_request.params import SamplingParams
from phase0_request.support.checks import check_int, check_number, invalid

MAX_PRIORITY = 1 << 31
MAX_SALT = 256  # characters


class RequestState(Enum):
    """The four states of a request."""

    WAITING = "waiting"  # submitted, holds no pages
    RUNNING = "running"  # scheduled in steps
    PREEMPTED = "preempted"  # its pages were freed; waits to run again
    FINISHED = "finished"


class FinishReason(Enum):
    """Why a request ended."""

    STOP = "stop"  # an end-of-sequence token, a stop token or a stop string
    LENGTH = "length"  # max_tokens, or the end of the context
    ABORT = "abort"  # the client disconnected or cancelled
    ERROR = "error"  # the request could not be served; `Request.error` says why
    TIMEOUT = "timeout"  # a deadline passed


class InvalidTransitionError(RuntimeError):
    """The engine asked for a transition that the request's state does not allow: always a bug in the engine."""

    def __init__(self, request: "Request", action: str, why: str) -> None:
        super().__init__(f"request {request.id} ({request.state.value}) cannot {action}: {why}")


@dataclass(slots=True)
class RequestTimes:
    """Timestamps of one request and the latencies computed from them: seconds on the engine's or a simulated clock."""

    arrival: float
    admitted: float | None = None  # first admission; resuming after a preemption does not change it
    tokens: MutableSequence[float] = field(default_factory=list)  # one timestamp for each output token
    finished: float | None = None

    @property
    def queue_time(self) -> float | None:
        """Arrival to first admission."""
        return None if self.admitted is None else self.admitted - self.arrival

    @property
    def ttft(self) -> float | None:
        """Time to first token. It starts at arrival, so it includes the queue time."""
        return self.tokens[0] - self.arrival if self.tokens else None

    @property
    def itl(self) -> list[float]:
        """Inter-token latencies: the gaps between consecutive tokens. n tokens have n - 1 gaps."""
        return [later - earlier for earlier, later in zip(self.tokens, self.tokens[1:], strict=False)]

    @property
    def e2e(self) -> float | None:
        """End-to-end latency: arrival to the end, whatever the finish reason."""
        return None if self.finished is None else self.finished - self.arrival


class UnknownTokenError(ValueError):
    """A field of a request names a token id that the model does not have."""

    def __init__(self, field: str, why: str) -> None:
        super().__init__(f"{field}: {why}")
        self.field = field


@dataclass(slots=True, weakref_slot=True, eq=False)
class Request:
    """One prompt, its output tokens so far, and its state.

    `computed` counts the tokens that have keys and values in the cache; `total` counts all tokens, prompt and output.
    While `computed < total` there is work. When the two are equal, the model has just predicted one more token:
    `append` adds it, and there is work again, until `finish`.

            admit            preempt
    WAITING -----> RUNNING <---------> PREEMPTED       `finish` leads from each of them to FINISHED,
                              admit                    by STOP and LENGTH only once it has run.
    """

    id: str
    prompt_tokens: tuple[int, ...]
    params: SamplingParams = field(default_factory=SamplingParams)
    priority: int = 0  # lower runs earlier
    arrival: float = 0.0
    cache_salt: str = ""  # cached prefixes are shared only between requests of the same salt
    tenant: str = ""  # the client that sent it
    output_tokens: list[int] = field(default_factory=list, init=False)
    reusable: int | None = field(default=None, init=False)  # at most so many tokens come from the cache; None: all
    more: Any = field(default=None, init=False)  # what extras keep with the request
    computed: int = field(default=0, init=False)
    state: RequestState = field(default=RequestState.WAITING, init=False)
    finish_reason: FinishReason | None = field(default=None, init=False)
    error: str | None = field(default=None, init=False)
    times: RequestTimes = field(init=False)

    def __post_init__(self) -> None:
        self.prompt_tokens = tuple(self.prompt_tokens)
        if not self.prompt_tokens:
            raise ValueError(f"request {self.id}: the prompt is empty; at least one token is needed")
        if {*map(type, self.prompt_tokens)} != {int} or min(self.prompt_tokens) < 0:  # may be a million: fast
            wrong = next(token for token in self.prompt_tokens if type(token) is not int or token < 0)
            raise ValueError(f"request {self.id}: a prompt token must be an integer from 0, got {wrong!r}")
        check_int(f"request {self.id}: priority", self.priority, -MAX_PRIORITY, MAX_PRIORITY)
        check_number(f"request {self.id}: arrival", self.arrival)
        if not isinstance(self.cache_salt, str) or len(self.cache_salt) > MAX_SALT:
            raise invalid(
                f"request {self.id}: cache_salt", f"a string of at most {MAX_SALT} characters", self.cache_salt
            )
        self.reusable = 0 if self.params.computes_prompt and len(self.prompt_tokens) > 1 else None
        self.times = RequestTimes(self.arrival)

    def check_fits(self, vocab_size: int, context: int, has_tokenizer: bool) -> None:
        """ValueError unless a model can serve this request. An engine makes this check where a request enters it."""
        params, length, name = self.params, len(self.prompt_tokens), f"request {self.id}"
        highest, field = max((max(self.prompt_tokens), "prompt"), params.highest_token)
        if highest >= vocab_size:
            raise UnknownTokenError(field, f"token ids of this model run from 0 to {vocab_size - 1}, got {highest}")
        if not has_tokenizer and (fields := params.needs_text):
            raise ValueError(f"{name}: {' and '.join(fields)} need a tokenizer, and this model has none")
        if length + params.max_tokens > context:
            both = f"the prompt has {length} tokens and max_tokens is {params.max_tokens}"
            raise ValueError(f"{name}: {both}; together at most {context} fit into the context")

    @property
    def total(self) -> int:
        """The number of known tokens: prompt and output."""
        return len(self.prompt_tokens) + len(self.output_tokens)

    @property
    def finished(self) -> bool:
        return self.state is RequestState.FINISHED

    @property
    def cacheable_tokens(self) -> int:
        """How many of the first tokens may come from the prefix cache."""
        return self.total if self.reusable is None else self.reusable

    def tokens(self, start: int, stop: int) -> list[int]:
        """The tokens from position `start` up to `stop`, over prompt and output as one sequence."""
        if not 0 <= start <= stop <= self.total:
            raise IndexError(f"request {self.id} has tokens 0 to {self.total}, not {start} to {stop}")
        split = len(self.prompt_tokens)
        return [*self.prompt_tokens[start:stop], *self.output_tokens[max(start - split, 0) : max(stop - split, 0)]]

    def admit(self, now: float) -> None:
        """Start to run, or resume after a preemption."""
        if self.state is not RequestState.WAITING and self.state is not RequestState.PREEMPTED:
            raise InvalidTransitionError(self, "be admitted", "only a waiting or preempted request can")
        self.state = RequestState.RUNNING
        if self.times.admitted is None:
            self.times.admitted = now

    # region exercise 0.3
    def advance(self, start: int, length: int) -> None:
        """Record that a step has computed tokens `start` to `start + length`. `start` must equal `computed`."""
        stop = start + length
        if self.state is not RequestState.RUNNING:
            raise InvalidTransitionError(self, f"advance from {start} to {stop}", "it is not running")
        if start != self.computed or not start < stop <= self.total:
            done = f"{self.computed} of {self.total} are computed"
            raise InvalidTransitionError(self, f"advance from {start} to {stop}", done)
        self.computed = stop

    def append(self, token: int, now: float, *, predicted: bool = True) -> None:
        """Append an output token. If the model predicted it, all tokens before it must be computed."""
        if self.state is not RequestState.RUNNING:
            raise InvalidTransitionError(self, f"take token {token}", "it is not running")
        if predicted and self.computed != self.total:
            raise InvalidTransitionError(self, f"take token {token}", f"{self.computed} of {self.total} are computed")
        self.output_tokens.append(token)
        self.times.tokens.append(now)

    def preempt(self) -> None:
        """Stop running because another request needs the pages. The tokens stay, and none counts as computed."""
        if self.state is not RequestState.RUNNING:
            raise InvalidTransitionError(self, "be preempted", "it is not running")
        self.state = RequestState.PREEMPTED
        self.computed = 0

    # endregion

    def finish(self, reason: FinishReason, now: float, error: str | None = None) -> None:
        """End the request. Only ERROR comes with an `error`. STOP and LENGTH are legal in RUNNING and in PREEMPTED: the
        text may turn out to contain a stop string after the pages are gone. Other reasons are legal in WAITING, too.
        """
        if self.state is RequestState.FINISHED:
            raise InvalidTransitionError(self, f"finish ({reason.value})", f"it has already finished ({self._reason})")
        if reason in (FinishReason.STOP, FinishReason.LENGTH) and self.state is RequestState.WAITING:
            raise InvalidTransitionError(self, f"finish ({reason.value})", "it has not run")
        if (error is not None) != (reason is FinishReason.ERROR):
            raise ValueError(f"request {self.id}: an error message goes with reason error, and only with it")
        self.state = RequestState.FINISHED
        self.finish_reason = reason
        self.error = error
        self.times.finished = now

    def stop_after_all(self) -> None:
        """Change the finish reason from LENGTH to STOP: the text of the last token completed a stop string."""
        if self.finish_reason is not FinishReason.LENGTH:
            raise InvalidTransitionError(self, "have stopped after all", f"it ended by {self._reason}, not by length")
        self.finish_reason = FinishReason.STOP

    @property
    def _reason(self) -> str:
        return self.finish_reason.value if self.finish_reason else "no reason"

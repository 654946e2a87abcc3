"""Slice, Batch and Event: the work of a step, and its results. Prefill, decode and chunk are all slices."""

from collections.abc import Collection, Iterator, MutableSequence, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from phase0_request.queue import SequenceState, WaitHandle
from phase0_request.request import FinishReason, Request


class Slice(NamedTuple):
    """Compute tokens `start` to `start + length` of a request.

    The slice may reach into `beyond`: tokens that follow the request's last one without belonging to it. The step then
    computes logits for each of them. None of them counts as computed unless an Outcome says so.

    `completes` compares the slice with the request's state: it is valid only between planning a step and committing it.
    """

    request: Request
    start: int
    length: int
    beyond: tuple[int, ...] = ()

    @property
    def stop(self) -> int:
        return self.start + self.length

    @property
    def completes(self) -> bool:
        """Whether the slice reaches the request's last token and so yields an output token. If not, it is a chunk."""
        return self.start + self.length >= self.request.total


@dataclass(slots=True)
class Batch:
    """The slices of one step, at most one for each request. `tokens[i]` of the step's output belongs to `slices[i]`."""

    slices: Sequence[Slice] = ()
    sequences: Sequence[SequenceState] = ()  # of each slice, if its scheduler counts what is in flight

    def __len__(self) -> int:
        return len(self.slices)

    def __iter__(self) -> Iterator[Slice]:
        return iter(self.slices)

    @property
    def num_tokens(self) -> int:
        return sum(s.length for s in self.slices)

    @property
    def tokens_by_kind(self) -> tuple[int, int]:
        """The number of prefill tokens and of decode tokens. A slice that starts with the newest output token is a
        decode. All others are prefills, even of output tokens that a preemption has left to recompute."""
        total = decode = 0
        for request, start, length, _ in self.slices:
            total += length
            if start >= len(request.prompt_tokens) and start + 1 >= request.total:
                decode += length
        return total - decode, decode


NO_TOKEN_LEFT = "no token can be drawn: all logits are -inf, so the model and the request's parameters leave none"
"""The error of a request that cannot get a token, because its parameters or its model exclude all of them."""


class Commit(Protocol):
    """The operations of a commit that an Outcome may use."""

    def advance(self, request: Request, start: int, length: int) -> None: ...

    def append(
        self, request: Request, token: int, now: float, more: object = None, *, predicted: bool = True
    ) -> None: ...

    def block(self, request: Request, until: WaitHandle) -> None: ...

    def end(self, request: Request, reason: FinishReason, now: float, error: str | None = None) -> None: ...


class Outcome(Protocol):
    """A result of more than one token for a slice. It applies itself."""

    def apply(self, commit: Commit, part: Slice, now: float) -> None: ...


@dataclass(slots=True)
class StepOutput:
    """The results of one step. `failed` and `more` are keyed by the index of a slice; both are empty in most steps."""

    tokens: MutableSequence[
        int | None
    ]  # of each slice: the next one if it reaches the newest token of its request, else None
    failed: dict[int, str] = field(default_factory=dict)  # error messages of requests that cannot go on
    more: dict[int, Outcome] = field(default_factory=dict)  # of slices that yield more than a token


class Event(NamedTuple):
    """News of one request: a token, a finish reason, or both. Delivered once, in order; a finish reason comes last.

    A request that ends between two tokens, by an error for example, gets an event without a token.
    """

    request: Request
    token: int | None
    finish_reason: FinishReason | None = None
    more: object = None  # what an Outcome adds to its token


def reason_to_finish(request: Request, eos_ids: Collection[int]) -> FinishReason | None:
    """Return why the newest output token ends the request, or None to go on.

    The first `min_tokens` tokens never stop a request. If a token both stops it and reaches its length, STOP wins.
    """
    # region exercise 0.2
    params = request.params
    token = request.output_tokens[-1]
    if len(request.output_tokens) > params.min_tokens and (
        token in params.stop_token_ids or (token in eos_ids and not params.ignore_eos)
    ):
        return FinishReason.STOP
    if len(request.output_tokens) >= params.max_tokens:
        return FinishReason.LENGTH
    return None
    # endregion

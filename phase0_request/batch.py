"""Slice, Batch and Event: what one step computes, and what it yields. Prefill, decode and chunk are all slices."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from phase0_request.request import FinishReason, Request, TokenLogprobs


class Slice(NamedTuple):
    """Compute tokens `start` to `start + length` of a request.

    `completes` compares the slice with the request's state. It holds from planning a step until its commit.
    """

    request: Request
    start: int
    length: int

    @property
    def stop(self) -> int:
        return self.start + self.length

    @property
    def completes(self) -> bool:
        """Whether the slice reaches the request's last token. Only then does it yield an output token; else it is a
        chunk."""
        return self.start + self.length >= self.request.total


@dataclass(frozen=True, slots=True)
class Batch:
    """The slices of one step, at most one for each request. `tokens[i]` of the step's output belongs to `slices[i]`."""

    slices: tuple[Slice, ...] = ()

    def __len__(self) -> int:
        return len(self.slices)

    def __iter__(self) -> Iterator[Slice]:
        return iter(self.slices)

    @property
    def num_tokens(self) -> int:
        return sum(s.length for s in self.slices)

    @property
    def tokens_by_kind(self) -> tuple[int, int]:
        """The number of prefill tokens and of decode tokens. A slice is a decode if it is the newest output token,
        alone or with a draft to verify. All others are prefills, also of output tokens after a preemption."""
        total = decode = 0
        for request, start, length in self.slices:
            total += length
            if start >= len(request.prompt_tokens) and start + 1 >= request.total:
                decode += length
        return total - decode, decode


class Verified(NamedTuple):
    """A token that a step drew after an accepted draft: each draft before it is the token that was drawn there."""

    token: int
    logprobs: TokenLogprobs | None = None


class Forced(NamedTuple):
    """What follows a token whatever the model says, because a grammar leaves no choice."""

    tokens: Sequence[int] = ()
    ends: bool = False  # the output is complete with them


NO_TOKEN_LEFT = "no token can be drawn: all logits are -inf, so the model, logit_bias, min_tokens and masks leave none"
"""The error of a request that can get no token: its fields or its model exclude every one."""

GRAMMAR_REFUSED = "its grammar is refused"
"""The beginning of the error for a grammar that cannot be used; what is wrong with it follows after a colon."""

GRAMMAR_FAILED = "its grammar cannot be followed any further"
"""The beginning of the error for a grammar that is too complex for what the output has become."""


class WaitHandle(Protocol):
    """Tells when a request that could draw no token can."""

    def done(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class StepOutput:
    """The results of one step. The mappings are keyed by the index of the slice and are empty in most steps."""

    tokens: Sequence[int | None]  # of each slice: the next token if it completes its request, else None
    failed: Mapping[int, str] = field(default_factory=dict)  # error messages of requests that cannot go on
    logprobs: Mapping[int, TokenLogprobs] = field(default_factory=dict)  # for requests that asked for them
    prompt_logprobs: Mapping[int, Sequence[TokenLogprobs]] = field(default_factory=dict)  # of tokens start + 1 onwards
    forced: Mapping[int, Forced] = field(default_factory=dict)  # after the token. An engine may draw these one by one
    late: Mapping[int, WaitHandle] = field(default_factory=dict)  # no token yet: the last token is computed again
    verified: Mapping[int, Sequence[Verified]] = field(default_factory=dict)  # after the token, before forced ones
    embeddings: Mapping[int, bytes] = field(default_factory=dict)  # for requests that asked for them


class Event(NamedTuple):
    """News of one request: a token, a finish reason, or both. Delivered once, in order; a finish reason comes last.

    A request that ends between two tokens, by an error for example, gets an event without a token.
    """

    request: Request
    token: int | None
    finish_reason: FinishReason | None = None
    logprobs: TokenLogprobs | None = None


def reason_to_finish(request: Request, eos_ids: Collection[int]) -> FinishReason | None:
    """Return why the newest output token ends the request, or None to go on.

    The first `min_tokens` tokens never stop a request. If a token both stops it and reaches its length, STOP wins.
    """
    # region exercise 0.3
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

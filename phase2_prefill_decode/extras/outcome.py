"""SliceOutcome: a slice's result of more than one token. RequestExtras: data that extras keep with a request.

Each capability adds its part to the outcome of the slice, and `apply` commits all parts in order.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from phase0_request.batch import Commit, Slice, StepOutput
from phase0_request.params import TokenLogprobs
from phase0_request.queue import WaitHandle
from phase0_request.request import FinishReason, InvalidTransitionError, Request


class Verified(NamedTuple):
    """A token that a step drew after an accepted draft: every draft before it equals the token drawn in its place."""

    token: int
    logprobs: TokenLogprobs | None = None


class Forced(NamedTuple):
    """Tokens that follow a drawn one whatever the model says, because a grammar leaves no choice."""

    tokens: Sequence[int] = ()
    ends: bool = False  # the output is complete with them


@dataclass(slots=True)
class RequestExtras:
    """What extras keep with a request."""

    accepted_drafts: int = 0  # tokens of drafts so far
    rejected_drafts: int = 0
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)  # for prompt tokens 1, 2, ...
    embedding: bytes | None = None  # float32, if `params.embed` asks for it


def extras_of(request: Request) -> RequestExtras:
    """What extras keep with this request."""
    if request.more is None:
        request.more = RequestExtras()
    extras: RequestExtras = request.more
    return extras


@dataclass(slots=True)
class SliceOutcome:
    """The outcome of one slice."""

    token: int | None
    logprobs: TokenLogprobs | None = None
    verified: list[Verified] = field(default_factory=list)  # after the token
    forced: Forced | None = None  # after those
    late: WaitHandle | None = None  # there is no token yet: the last one before it is computed again
    prompt_logprobs: Sequence[TokenLogprobs] = ()  # for tokens start + 1 onwards
    embedding: bytes | None = None

    def apply(self, commit: Commit, part: Slice, now: float) -> None:
        """Advance the request, and append its tokens until one ends it."""
        request = part.request
        if self.prompt_logprobs:
            add_prompt_logprobs(request, part.start, self.prompt_logprobs)
        if self.embedding is not None:
            extras_of(request).embedding = self.embedding
        if self.late is not None:
            known = part.length - len(part.beyond) - 1  # the last token is computed again
            if known and part.start == request.computed:
                commit.advance(request, part.start, known)
            commit.block(request, self.late)
            return
        commit.advance(request, part.start, part.length - len(part.beyond))
        if request.computed < request.total:
            return
        if self.token is None:
            raise ValueError(f"the step gave no token for request {request.id}, which it completed")
        commit.append(request, self.token, now, self.logprobs)
        for token, logprobs in self.verified:
            if not request.finished:
                commit.advance(request, request.computed, 1)
                commit.append(request, token, now, logprobs)
        if self.forced is None:
            return
        for token in self.forced.tokens:  # one slice: prefilled together, not decoded one by one
            if not request.finished:
                commit.append(request, token, now, predicted=False)
        if self.forced.ends and not request.finished:
            commit.end(request, FinishReason.STOP, now)


def outcome_of(output: StepOutput, number: int) -> SliceOutcome:
    """The outcome of a slice, to which a capability adds its part."""
    outcome = output.more.get(number)
    if outcome is None:
        outcome = output.more[number] = SliceOutcome(output.tokens[number])
    assert isinstance(outcome, SliceOutcome)
    return outcome


def drawn_of(output: StepOutput, number: int) -> list[int]:
    """The tokens that a step drew for a slice: the next one, and those after accepted drafts."""
    token, outcome = output.tokens[number], output.more.get(number)
    verified = outcome.verified if isinstance(outcome, SliceOutcome) else ()
    return [] if token is None else [token, *(each.token for each in verified)]


def add_prompt_logprobs(request: Request, start: int, logprobs: Sequence[TokenLogprobs]) -> None:
    """Record the logprobs of the prompt tokens after position `start`. Recomputed ones, after a preemption, are
    ignored. Tokens whose logprobs are known may come from the cache."""
    scores, length = extras_of(request).prompt_logprobs, len(request.prompt_tokens)
    known = len(scores)
    if start > known or start + len(logprobs) >= length:
        given = f"prompt logprobs {start + 1} to {start + len(logprobs)}"
        raise InvalidTransitionError(request, f"take {given}", f"{known} are known, and its prompt has {length} tokens")
    scores += logprobs[known - start :]
    request.reusable = len(scores) if len(scores) < length - 1 else None

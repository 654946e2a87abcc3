"""Slice and Batch: what one step computes. A prefill, a decode and a chunk are the same thing seen at three sizes."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from phase0_request.logprobs import TokenLogprobs
from phase0_request.request import Request


class Slice(NamedTuple):
    """Compute tokens `start` to `start + length` of a request, over what is computed before them.

    Its properties are asked between planning a step and committing it: committing moves the request on.
    """

    request: Request
    start: int
    length: int

    @property
    def stop(self) -> int:
        return self.start + self.length

    @property
    def completes(self) -> bool:
        """After it nothing known is left to compute, so it yields a token. A slice that stops short yields none."""
        return self.stop >= self.request.total

    @property
    def is_decode(self) -> bool:
        """It computes the one newest token, which the engine itself produced."""
        return self.length == 1 and self.completes and self.start >= len(self.request.prompt_tokens)

    @property
    def is_prefill(self) -> bool:
        """It computes anything else: a prompt or, after a preemption, a prompt and what was said since."""
        return not self.is_decode

    @property
    def is_chunk(self) -> bool:
        """It is a prefill that leaves some of its tokens to later steps."""
        return not self.completes


@dataclass(frozen=True, slots=True)
class Batch:
    """The slices of one step, each of another request. `tokens[i]` of a step's result belongs to `slices[i]`."""

    slices: tuple[Slice, ...] = ()

    def __len__(self) -> int:
        return len(self.slices)

    def __iter__(self) -> Iterator[Slice]:
        return iter(self.slices)

    @property
    def num_tokens(self) -> int:
        return sum(s.length for s in self.slices)

    @property
    def num_prefill_tokens(self) -> int:
        return sum(s.length for s in self.slices if s.is_prefill)

    @property
    def num_decode_tokens(self) -> int:
        return sum(1 for s in self.slices if s.is_decode)


StepTokens = Sequence[int | None]
"""What a step yields: the next token for each slice that completes its request, None for each that does not."""


@dataclass(frozen=True, slots=True)
class StepOutput:
    """All that a step yields. The mappings are by the number of the slice, and empty for most steps."""

    tokens: StepTokens
    failed: Mapping[int, str] = field(default_factory=dict)  # its request cannot go on, and why; the others can
    logprobs: Mapping[int, TokenLogprobs] = field(default_factory=dict)  # for the requests that asked
    scores: Mapping[int, Sequence[TokenLogprobs]] = field(default_factory=dict)  # of the prompt tokens after its start

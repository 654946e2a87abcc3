"""SamplingMetadata: what the rows of one step ask of the sampler."""

from collections.abc import Sequence
from dataclasses import dataclass

from phase2_prefill_decode.sampling.inputs import Columns
from phase2_prefill_decode.sampling.processors import Work


@dataclass(frozen=True, slots=True)
class SamplingMetadata:
    """What the rows ask for. Most steps ask for nothing but a draw."""

    rows: int
    columns: Columns  # of SamplingInputs; a recorded step has more rows there
    works: Sequence[Work] = ()

    @property
    def in_flight(self) -> bool:
        """Whether a token of the step before must be known before this one is sampled."""
        return any(work.in_flight for work in self.works)

    @property
    def more_rows(self) -> list[int]:
        """The tokens of the step that need a final hidden state and draw nothing."""
        return [row for work in self.works for row in work.rows]

    @property
    def wants_hidden(self) -> bool:
        """Whether final hidden states are wanted beside the logits."""
        return any(work.wants_hidden or work.rows for work in self.works)

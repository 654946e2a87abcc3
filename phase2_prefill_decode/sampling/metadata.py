"""SamplingMetadata: what the rows of one step ask of the sampler."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from phase0_request.params import SamplingParams
from phase2_prefill_decode.sampling.constraints import StepMasks, is_constrained
from phase2_prefill_decode.sampling.edits import RequestEdits, wants_edits


@dataclass(frozen=True, slots=True)
class SamplingMetadata:
    """What the rows ask for. Most steps ask for nothing but a draw."""

    rows: int
    words: NDArray[np.int32]  # what SamplingInputs are read from; a recorded step has more rows there
    edits: Sequence[tuple[int, RequestEdits, int]] = ()  # row, the changes of its logits, which output token it draws
    masks: StepMasks | None = None
    logprobs: Sequence[tuple[int, int]] = ()  # (row, number of alternatives)

    @property
    def is_plain(self) -> bool:
        """Whether the rows ask for nothing but a draw, as a recorded step makes it: see `asks_for_more`."""
        return not (self.edits or self.logprobs) and self.masks is None

    @property
    def in_flight(self) -> bool:
        """Whether edits or masks depend on a token of the step before, which must end first."""
        masks = self.masks is not None and self.masks.in_flight
        return masks or any(edits.in_flight(index) for _, edits, index in self.edits)


def asks_for_more(params: SamplingParams) -> bool:
    """Whether a request may ever need more than a draw: edits, a mask, or log-probabilities. If none of a step's
    requests does, its metadata is plain."""
    return params.logprobs is not None or wants_edits(params) or is_constrained(params)

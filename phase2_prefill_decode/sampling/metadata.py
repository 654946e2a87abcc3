"""SamplingMetadata: what the rows of one step ask of the sampler."""

from collections.abc import Sequence
from dataclasses import dataclass

from phase0_request.params import SamplingParams
from phase2_prefill_decode.extras.grammar.constraints import Rows, in_flight, is_constrained
from phase2_prefill_decode.extras.penalties import RequestEdits, wants_edits
from phase2_prefill_decode.sampling.inputs import Columns


@dataclass(frozen=True, slots=True)
class SamplingMetadata:
    """What the rows ask for. Most steps ask for nothing but a draw."""

    rows: int
    columns: Columns  # of SamplingInputs; a recorded step has more rows there
    edits: Sequence[tuple[int, RequestEdits, int]] = ()  # row, the changes of its logits, which output token it draws
    masks: Rows = ()
    logprobs: Sequence[tuple[int, int]] = ()  # (row, number of alternatives)
    embeds: Sequence[int] = ()  # rows whose final hidden state is wanted too

    @property
    def is_plain(self) -> bool:
        """Whether the rows ask for nothing but a draw, as a recorded step makes it: see `asks_for_more`."""
        return not (self.edits or self.masks or self.logprobs or self.embeds)

    @property
    def in_flight(self) -> bool:
        """Whether edits or masks depend on a token of the step before, which must end first."""
        return in_flight(self.masks) or any(edits.in_flight(index) for _, edits, index in self.edits)


def asks_for_more(params: SamplingParams) -> bool:
    """Whether a request may ever need more than a draw: edits, a mask, log-probabilities, or its hidden state. If none
    of a step's requests does, its metadata is plain."""
    return params.logprobs is not None or params.embed or wants_edits(params) or is_constrained(params)

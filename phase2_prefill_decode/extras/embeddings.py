"""Embeddings: the final hidden state of the last prompt token, for requests with `embed`."""

from collections.abc import Sequence
from itertools import accumulate

from torch import Tensor

from phase0_request.batch import Batch, StepOutput
from phase0_request.params import SamplingParams
from phase2_prefill_decode.extras.outcome import outcome_of
from phase2_prefill_decode.sampling.processors import DrawRow, Processor, Work
from phase2_prefill_decode.transfer import to_host


class Embeddings(Processor):
    """Keeps the final hidden state of the last prompt token."""

    def wants(self, params: SamplingParams) -> bool:
        return params.embed

    def pack(self, batch: Batch, draws: Sequence[DrawRow]) -> Work | None:
        asked = [draw for draw in draws if draw.part.request.params.embed and not draw.output_index]
        stops = [*accumulate(part.length for part in batch.slices)]
        return EmbeddingsWork(asked, [stops[draw.number] - 1 for draw in asked]) if asked else None


class EmbeddingsWork(Work):
    """The hidden states of one step."""

    def __init__(self, asked: Sequence[DrawRow], rows: Sequence[int]) -> None:
        self.asked, self.rows = asked, rows

    def collect(self, logits: Tensor, tokens: Tensor, hidden: Tensor) -> None:
        self._states = to_host(hidden.float())

    def finish(self, output: StepOutput, tokens: Sequence[int], peaks: Sequence[float]) -> None:
        for draw, state in zip(self.asked, self._states.numpy(), strict=True):
            outcome_of(output, draw.number).embedding = state.tobytes()

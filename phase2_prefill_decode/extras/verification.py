"""Verification: accepts the draft tokens that equal the drawn ones, and adds the tokens drawn after them."""

import math
from collections.abc import Sequence

from phase0_request.batch import Batch, StepOutput
from phase0_request.params import SamplingParams
from phase2_prefill_decode.extras.outcome import Verified, outcome_of
from phase2_prefill_decode.sampling.processors import DrawRow, Processor, Work


class Verification(Processor):
    """Judges the tokens beyond a request's last one: the drafts of a step."""

    def wants(self, params: SamplingParams) -> bool:
        return False  # a slice brings its draft, whatever its request asks for

    def pack(self, batch: Batch, draws: Sequence[DrawRow]) -> Work | None:
        return VerificationWork(draws) if len(draws) > len({draw.number for draw in draws}) else None


class VerificationWork(Work):
    """Judges the drafts of one step."""

    def __init__(self, draws: Sequence[DrawRow]) -> None:
        self.draws = draws

    # region exercise 11.1
    def finish(self, output: StepOutput, tokens: Sequence[int], peaks: Sequence[float]) -> None:
        """Add the token drawn after each accepted draft: a draft is accepted if it equals the token drawn from the
        row before it, and that row counts. A draw depends only on the logits, the seed and the position, so each is
        what it would have been without drafts. A row that gives no token ends the run; the tokens before it are
        right."""
        last, place, counts = -1, 0, False
        for row, number, part, _ in self.draws:
            last, place = number, place + 1 if number == last else 0
            right = place == 0 or (counts and part.beyond[place - 1] == tokens[row - 1])
            counts = right and math.isfinite(peaks[row])
            if place and counts:
                outcome_of(output, number).verified.append(Verified(tokens[row]))

    # endregion

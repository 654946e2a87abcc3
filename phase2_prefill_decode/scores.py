"""What the model found of a prompt's own tokens: the log-probabilities of what it was given, not of what it drew."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from phase0_request.batch import Batch, Slice, StepOutput
from phase0_request.request import TokenLogprobs
from phase2_prefill_decode.logprobs import Logprobs, logprobs_of
from phase2_prefill_decode.sampler import Sampled
from phase2_prefill_decode.sampling import to_device

BLOCK = 64  # rows at a time: a row of a large vocabulary takes megabytes on its way to a few numbers


@dataclass(frozen=True, slots=True)
class Scoring:
    """Of slice i, the first counts[i] rows predict tokens of its prompt: the targets, which are known."""

    counts: tuple[int, ...]
    targets: Tensor  # [rows] int64
    alternatives: tuple[int, ...]  # of each row, how many are asked for


@dataclass(frozen=True, slots=True)
class Scored:
    """A step that drew tokens and scored others, still on the device."""

    sampled: Sampled
    counts: tuple[int, ...]
    blocks: tuple[Logprobs, ...]

    def output(self, numbers: Sequence[int], slices: int) -> StepOutput:
        """On the host. A prompt that cannot be scored because of NaN is a failure of its request."""
        output = self.sampled.output(numbers, slices)
        found = (score for block in self.blocks for score in _on_host(block))
        scores = {number: [next(found) for _ in range(count)] for number, count in enumerate(self.counts) if count}
        failed = {
            number: "its prompt cannot be scored: there is NaN among the logits"
            for number, of in scores.items()
            if any(math.isnan(score.logprob) for score in of)
        }
        return replace(output, prompt_logprobs=scores, failed={**failed, **output.failed})


def pack_scores(batch: Batch, device: torch.device) -> Scoring | None:
    """Whose prompts are to be scored in a step; None if nobody asks."""
    counts = tuple(map(_rows, batch.slices))
    if not any(counts):
        return None
    targets: list[int] = []
    alternatives: list[int] = []
    for (request, start, _), count in zip(batch.slices, counts, strict=True):
        targets += request.prompt_tokens[start + 1 : start + 1 + count]
        alternatives += [request.params.prompt_logprobs or 0] * count
    return Scoring(counts, to_device(targets, torch.int64, device), tuple(alternatives))


def score(logits: Tensor, scoring: Scoring, sampled: Sampled) -> Scored:
    """logits: [rows, vocab], of the rows that are scored."""
    blocks = []
    for start in range(0, len(scoring.alternatives), BLOCK):
        rows = slice(start, start + BLOCK)
        block = logprobs_of(logits[rows], scoring.targets[rows], tuple(enumerate(scoring.alternatives[rows])))
        if block is not None:
            blocks.append(block)
    return Scored(sampled, scoring.counts, tuple(blocks))


def _rows(piece: Slice) -> int:
    """How many tokens of a prompt a slice predicts. The last one predicts what is drawn."""
    request = piece.request
    if request.params.prompt_logprobs is None:
        return 0
    return max(min(piece.stop, len(request.prompt_tokens) - 1) - piece.start, 0)


def _on_host(block: Logprobs) -> list[TokenLogprobs]:
    drawn, top, tokens = (tensor.flatten().tolist() for tensor in (block.drawn, block.top, block.tokens))
    return list(block.by_row(drawn, top, tokens).values())

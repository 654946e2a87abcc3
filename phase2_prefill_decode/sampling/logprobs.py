"""Log-probabilities: of drawn tokens, of prompt tokens, and of the likeliest alternatives.

They are the softmax of the model's own logits, before logit_bias, penalties, temperature and filters.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from phase0_request.batch import Batch, Slice
from phase0_request.request import TokenLogprobs
from phase2_prefill_decode.sampling.inputs import to_device

BLOCK = 64  # prompt rows at a time: each row of a large vocabulary takes megabytes


@dataclass(frozen=True, slots=True)
class Logprobs:
    """The log-probabilities of the rows that asked for them, on the device."""

    asked: tuple[tuple[int, int], ...]  # (row, number of alternatives)
    drawn: Tensor  # [asked] float32, of the token drawn
    top: Tensor  # [asked, most] float32, likeliest first, where `most` is the largest number of alternatives
    tokens: Tensor  # [asked, most] int64

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.drawn, self.top, self.tokens

    def by_row(self, drawn: Sequence[float], top: Sequence[float], tokens: Sequence[float]) -> dict[int, TokenLogprobs]:
        """Host objects by row, from the three tensors fetched and flattened. Alternatives of -inf are left out."""
        most = len(top) // len(self.asked)
        found = {}
        for i, (row, many) in enumerate(self.asked):
            best = range(i * most, i * most + min(many, most))
            pairs = tuple((int(tokens[j]), top[j]) for j in best if top[j] > -math.inf)
            found[row] = TokenLogprobs(drawn[i], pairs)
        return found


def logprobs_of(logits: Tensor, tokens: Tensor, asked: tuple[tuple[int, int], ...]) -> Logprobs | None:
    """logits: [rows, vocab], the model's own; tokens: [rows], the tokens drawn."""
    if not asked:
        return None
    rows = to_device([row for row, _ in asked], torch.int64, logits.device)
    logprobs = logits[rows].float().log_softmax(-1)
    top = likeliest(logprobs, max(many for _, many in asked))
    return Logprobs(asked, logprobs.gather(-1, tokens[rows][:, None])[:, 0], logprobs.gather(-1, top), top)


def likeliest(logprobs: Tensor, many: int) -> Tensor:
    """The ids of the `many` largest of each row, [rows, many]; among equals the lower id first. In float32.

    `topk` leaves the order of equals open, and bfloat16 logits have many. So it sorts unique integers instead: the bits
    of the number in the upper half, ordered by inverting those of negative ones, and the id in the lower half.
    """
    vocab = logprobs.shape[1]
    bits = logprobs.view(torch.int32)
    order = bits ^ (bits >> 31 & 0x7FFFFFFF)
    keys = (order.long() << 32) - torch.arange(vocab, device=logprobs.device)
    return keys.topk(min(many, vocab)).indices


# Prompt logprobs: the rows of a prompt predict tokens that are already known.


@dataclass(frozen=True, slots=True)
class PromptTargets:
    """The prompt tokens that a step computes the log-probabilities of."""

    counts: tuple[int, ...]  # the first counts[i] rows of slice i predict tokens of its prompt
    targets: Tensor  # [rows] int64, these tokens
    alternatives: tuple[int, ...]  # of each row, the number asked for


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """The log-probabilities of the prompt tokens of a step, on the device."""

    counts: tuple[int, ...]
    blocks: tuple[Logprobs, ...]

    def by_slice(self, numbers: Sequence[Sequence[float]]) -> dict[int, list[TokenLogprobs]]:
        """Host objects by number of the slice, from the tensors of the blocks, fetched and flattened."""
        of_blocks = zip(self.blocks, zip(*[iter(numbers)] * 3, strict=True), strict=True)
        found = (one for block, three in of_blocks for one in block.by_row(*three).values())
        return {number: [next(found) for _ in range(count)] for number, count in enumerate(self.counts) if count}


def pack_prompt_targets(batch: Batch, device: torch.device) -> PromptTargets | None:
    """The prompt tokens to score in a step; None if no request asks for prompt_logprobs."""
    counts = tuple(map(_predicted, batch.slices))
    if not any(counts):
        return None
    targets: list[int] = []
    alternatives: list[int] = []
    for (request, start, _), count in zip(batch.slices, counts, strict=True):
        targets += request.prompt_tokens[start + 1 : start + 1 + count]
        alternatives += [request.params.prompt_logprobs or 0] * count
    return PromptTargets(counts, to_device(targets, torch.int64, device), tuple(alternatives))


def prompt_logprobs_of(hidden: Tensor, lm_head: Callable[[Tensor], Tensor], prompt: PromptTargets) -> PromptLogprobs:
    """hidden: [rows, hidden_size], the final hidden states of the rows that predict prompt tokens. Logits are computed
    for a block of rows at a time."""
    blocks = []
    for start in range(0, len(prompt.alternatives), BLOCK):
        rows = slice(start, start + BLOCK)
        block = logprobs_of(lm_head(hidden[rows]), prompt.targets[rows], tuple(enumerate(prompt.alternatives[rows])))
        if block is not None:
            blocks.append(block)
    return PromptLogprobs(prompt.counts, tuple(blocks))


def _predicted(piece: Slice) -> int:
    """The number of prompt tokens that a slice predicts. The last token of a prompt predicts the first drawn one."""
    request = piece.request
    if request.params.prompt_logprobs is None:
        return 0
    return max(min(piece.stop, len(request.prompt_tokens) - 1) - piece.start, 0)

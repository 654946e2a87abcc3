"""Log-probabilities: of drawn tokens, of prompt tokens, and of the likeliest alternatives.

They are the softmax of the model's own logits, before logit_bias, penalties, temperature and filters.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from phase0_request.batch import Batch, Slice
from phase0_request.request import TokenLogprobs
from phase2_prefill_decode.transfer import to_device, to_host

BLOCK = 64  # prompt rows at a time: each row of a large vocabulary takes megabytes


@dataclass(frozen=True, slots=True)
class Logprobs:
    """The log-probabilities of some rows."""

    alternatives: tuple[int, ...]  # of each row, the number asked for
    own: Tensor  # [rows] float32, of the token drawn or of the prompt
    top: Tensor  # [rows, most] float32, likeliest first, where `most` is the largest number of alternatives
    tokens: Tensor  # [rows, most] int64

    def to_host(self) -> "Logprobs":
        """Start to copy them to the host."""
        return Logprobs(self.alternatives, to_host(self.own), to_host(self.top), to_host(self.tokens))

    def read(self) -> list[TokenLogprobs]:
        """Those of each row. Alternatives of -inf are left out."""
        rows = zip(self.alternatives, self.own.tolist(), self.top.tolist(), self.tokens.tolist(), strict=True)
        return [
            TokenLogprobs(
                own, tuple((token, p) for token, p in zip(tokens[:count], top, strict=False) if p > -math.inf)
            )
            for count, own, top, tokens in rows
        ]


def logprobs_of(logits: Tensor, tokens: Tensor, alternatives: tuple[int, ...]) -> Logprobs:
    """logits: [rows, vocab], the model's own; tokens: [rows]."""
    logprobs = logits.float().log_softmax(-1)
    top = likeliest(logprobs, max(alternatives))
    return Logprobs(alternatives, logprobs.gather(-1, tokens[:, None])[:, 0], logprobs.gather(-1, top), top)


def likeliest(logprobs: Tensor, count: int) -> Tensor:
    """The ids of the `count` largest of each row, [rows, count]; among equals the lower id first. In float32.

    `topk` leaves the order of equals open, and bfloat16 logits have many. So it sorts unique integers instead: the bits
    of the number in the upper half, ordered by inverting those of negative ones, and the id in the lower half.
    """
    vocab = logprobs.shape[1]
    bits = logprobs.view(torch.int32)
    order = bits ^ (bits >> 31 & 0x7FFFFFFF)
    keys = (order.long() << 32) - torch.arange(vocab, device=logprobs.device)
    return keys.topk(min(count, vocab)).indices


@dataclass(frozen=True, slots=True)
class PromptTargets:
    """The prompt tokens that a step computes the log-probabilities of: its rows predict tokens that are known."""

    counts: tuple[int, ...]  # the first counts[i] rows of slice i predict tokens of its prompt
    targets: Tensor  # [rows] int64, these tokens
    alternatives: tuple[int, ...]  # of each row, the number asked for


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


def prompt_logprobs_of(hidden: Tensor, lm_head: Callable[[Tensor], Tensor], prompt: PromptTargets) -> list[Logprobs]:
    """hidden: [rows, hidden_size], the final hidden states of the rows that predict prompt tokens. Logits are computed
    for a block of rows at a time."""
    blocks = (slice(start, start + BLOCK) for start in range(0, len(prompt.alternatives), BLOCK))
    return [logprobs_of(lm_head(hidden[rows]), prompt.targets[rows], prompt.alternatives[rows]) for rows in blocks]


def _predicted(part: Slice) -> int:
    """The number of prompt tokens that a slice predicts. The last token of a prompt predicts the first drawn one."""
    request = part.request
    if request.params.prompt_logprobs is None:
        return 0
    return max(min(part.stop, len(request.prompt_tokens) - 1) - part.start, 0)

"""How likely the model found a token, and which it found likeliest: of its logits as they came, before any request's
biases, penalties, temperature or filters."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from phase0_request.request import TokenLogprobs
from phase2_prefill_decode.sampling import to_device


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Of the rows that asked, one after the other, on the device."""

    asked: tuple[tuple[int, int], ...]  # (row, how many alternatives)
    drawn: Tensor  # [asked] float32, of the token drawn
    top: Tensor  # [asked, most] float32, likeliest first; as many as the row that wants most
    tokens: Tensor  # [asked, most] int64

    def by_row(self, drawn: Sequence[float], top: Sequence[float], tokens: Sequence[float]) -> dict[int, TokenLogprobs]:
        """For the host, from the three tensors fetched and flat. What the model rules out is no alternative."""
        most = len(top) // len(self.asked)
        found = {}
        for i, (row, many) in enumerate(self.asked):
            best = range(i * most, i * most + min(many, most))
            pairs = tuple((int(tokens[j]), top[j]) for j in best if top[j] > -math.inf)
            found[row] = TokenLogprobs(drawn[i], pairs)
        return found


def logprobs_of(logits: Tensor, tokens: Tensor, asked: tuple[tuple[int, int], ...]) -> Logprobs | None:
    """logits: [rows, vocab] as the model gave them; tokens: [rows], what was drawn."""
    if not asked:
        return None
    rows = to_device([row for row, _ in asked], torch.int64, logits.device)
    logprobs = logits[rows].float().log_softmax(-1)
    top = likeliest(logprobs, max(many for _, many in asked))
    return Logprobs(asked, logprobs.gather(-1, tokens[rows][:, None])[:, 0], logprobs.gather(-1, top), top)


def likeliest(logprobs: Tensor, many: int) -> Tensor:
    """The ids of the `many` largest of each row, [rows, many]; of equals the lower id first. In float32.

    `topk` leaves open which of equals it takes, and logits that were bfloat16 have many. So it is given no equals, but
    integers: in front the bits of the number, which are in order once those of negative ones are turned over, then the
    id.
    """
    vocab = logprobs.shape[1]
    bits = logprobs.view(torch.int32)
    order = bits ^ (bits >> 31 & 0x7FFFFFFF)
    keys = (order.long() << 32) - torch.arange(vocab, device=logprobs.device)
    return keys.topk(min(many, vocab)).indices

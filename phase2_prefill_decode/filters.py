"""From logits to a token: weights, filters, draw. Weights are integers in proportion to the probabilities.

Sums of integers below 2^53 are exact in float64, in any order of adding. So a row draws the same token alone and in any
batch, and on any device whose `exp` agrees.

A filter returns the smallest weight to keep. Equal weights are kept too: no filter splits a tie, so the order in which
a sort or `topk` returns equals does not matter.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

HEAD = 64  # the likeliest tokens that mostly hold the nucleus; if not, 16 times as many, and so on
BLOCK = 512  # tokens, in a draw from a large vocabulary
LARGE = 8192  # tokens; above it, one running sum over the vocabulary costs more than two short ones


@dataclass(frozen=True, slots=True)
class FilterParams:
    """The parameters of one filter."""

    rows: Tensor | None  # [n] int64; None: all rows
    values: Tensor  # [n]
    largest: float  # the largest value, on the host


def weigh(logits: Tensor, peaks: Tensor, temperatures: Tensor, vocab_size: int) -> Tensor:
    """exp((logit - peak) / temperature), scaled to integers. logits: [rows, vocab]; peaks, temperatures: [rows].

    The likeliest token weighs between half of 2^53 / vocab_size and that; a token that many times less likely weighs 1.
    Weights are float32, whose 24 significant bits hold all that `exp` gives. The peak is subtracted first, so that no
    temperature, however small, overflows.
    """
    scale = 2.0 ** (53 - vocab_size.bit_length())
    return (logits.float() - peaks.float()[:, None]).div_(temperatures[:, None]).exp_().mul_(scale).round_()


def cut(weights: Tensor, params: FilterParams, threshold: Callable[[Tensor, FilterParams], Tensor]) -> None:
    """Zero, in place, the weights below a filter's threshold, in its rows."""
    selected = weights if params.rows is None else weights[params.rows]
    selected.mul_(selected >= threshold(selected, params)[:, None])
    if params.rows is not None:
        weights.index_copy_(0, params.rows, selected)


def min_p(weights: Tensor, params: FilterParams) -> Tensor:
    """The smallest weight to keep: this share of the likeliest token's."""
    return (weights.amax(-1) * params.values).to(weights.dtype)


def top_k(weights: Tensor, params: FilterParams) -> Tensor:
    """The smallest weight to keep: that of the k-th likeliest token."""
    return weights.topk(int(params.largest)).values.gather(-1, params.values.long()[:, None] - 1)[:, 0]


def top_p(weights: Tensor, params: FilterParams) -> Tensor:
    """The smallest weight to keep: that of the last token of the nucleus, the fewest tokens, likeliest first, whose
    probabilities sum to at least this share."""
    enough = (weights.sum(-1, dtype=torch.float64) * params.values)[:, None]
    head = _head(weights, enough)  # [rows, some], likeliest first
    # region exercise 2.5
    reached = head.cumsum(-1, dtype=torch.float64)  # of each token with those before it
    last = (reached < enough).sum(-1, keepdim=True)  # the first token that reaches it
    return head.gather(-1, last)[:, 0]
    # endregion


def _head(weights: Tensor, enough: Tensor) -> Tensor:
    """The likeliest weights in order, as many as reach `enough` in every row. Sorting the whole vocabulary costs many
    times as much, so it comes last; checking whether it is needed is worth a wait for the device."""
    count, vocab = HEAD, weights.shape[1]
    while True:
        head = weights.topk(min(count, vocab)).values
        if count >= vocab or not (head.sum(-1, keepdim=True, dtype=torch.float64) < enough).any():
            return head
        count *= 16


def draw(weights: Tensor, uniforms: Tensor) -> Tensor:
    """The token of each row at which the running sum of weights exceeds uniform * total. weights: [rows, vocab].

    A token of weight 0 is never drawn. The result for a row of NaN is a valid id without meaning.
    """
    vocab, share = weights.shape[1], uniforms[:, None]
    if vocab <= LARGE:
        sums = weights.cumsum(-1, dtype=torch.float64)
        return _first_past(sums, sums[:, -1:] * share)[:, 0]
    blocks = pad(weights, (0, -vocab % BLOCK)).view(len(weights), -1, BLOCK)
    masses = blocks.sum(-1, dtype=torch.float64)  # [rows, blocks]
    sums = masses.cumsum(-1)
    targets = sums[:, -1:] * share
    block = _first_past(sums, targets)
    targets -= sums.gather(-1, block) - masses.gather(-1, block)  # the rest of the target, inside the block
    inside = blocks[torch.arange(len(blocks), device=block.device), block[:, 0]]
    token = _first_past(inside.cumsum(-1, dtype=torch.float64), targets)
    return (block * BLOCK + token)[:, 0].clamp_(max=vocab - 1)


def _first_past(sums: Tensor, targets: Tensor) -> Tensor:
    """The first index of each row, [rows, 1], at which the running sum exceeds the target. Clamped, because with NaN
    there is none."""
    return torch.searchsorted(sums, targets, right=True).clamp_(max=sums.shape[1] - 1)

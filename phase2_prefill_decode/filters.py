"""From logits to a token: weigh, cut away, draw. All on weights: whole numbers in proportion to the probabilities.

Sums of whole numbers below 2^53 are exact in float64, so they come out the same in any order of adding. What a row
draws is then the same alone and in any batch, and on any device whose `exp` agrees.

A filter answers with the least weight that may stay. Weights equal to it stay too: no filter parts a tie, so the order
in which a sort or a `topk` leaves equals does not matter.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

HEAD = 64  # so many of the likeliest tokens mostly hold the nucleus; if not, 16 times as many, and so on
BLOCK = 512  # of tokens, in a draw from a large vocabulary
LARGE = 8192  # tokens; above it, a running sum over the whole vocabulary costs more than two short ones


@dataclass(frozen=True, slots=True)
class Ask:
    """What rows ask of one filter."""

    rows: Tensor | None  # [n] int64; None: every row asks
    values: Tensor  # [n]
    most: float  # the largest value, known without looking at the device


def weigh(logits: Tensor, peaks: Tensor, temperatures: Tensor) -> Tensor:
    """exp((logit - peak) / temperature) in whole numbers. logits: [rows, vocab]; peaks, temperatures: [rows].

    The likeliest token weighs at most 2^53 / vocab and at least half of that; one so many times less likely weighs 1.
    Weights are float32, which holds 24 significant bits and so all that `exp` gave. The peak goes first: after it no
    temperature, however small, can overflow upwards.
    """
    scale = 2.0 ** (53 - logits.shape[1].bit_length())
    return (logits.float() - peaks.float()[:, None]).div_(temperatures[:, None]).exp_().mul_(scale).round_()


def cut(weights: Tensor, ask: Ask, least: Callable[[Tensor, Ask], Tensor]) -> None:
    """Set to zero, in place, what a filter does not let stay, in the rows that ask for it."""
    asking = weights if ask.rows is None else weights[ask.rows]
    asking.mul_(asking >= least(asking, ask)[:, None])
    if ask.rows is not None:
        weights.index_copy_(0, ask.rows, asking)


def min_p(weights: Tensor, ask: Ask) -> Tensor:
    """A token stays if it has at least this share of the likeliest token's probability."""
    return (weights.amax(-1) * ask.values).to(weights.dtype)


def top_k(weights: Tensor, ask: Ask) -> Tensor:
    """The k likeliest tokens stay."""
    return weights.topk(int(ask.most)).values.gather(-1, ask.values.long()[:, None] - 1)[:, 0]


def top_p(weights: Tensor, ask: Ask) -> Tensor:
    """The fewest tokens stay, likeliest first, that together hold at least this share of what there is."""
    enough = (weights.sum(-1, dtype=torch.float64) * ask.values)[:, None]
    head = _head(weights, enough)  # [rows, some], likeliest first
    # region exercise 2.5
    reached = head.cumsum(-1, dtype=torch.float64)  # what each token holds together with those before it
    last = (reached < enough).sum(-1, keepdim=True)  # the first token at which that is enough
    return head.gather(-1, last)[:, 0]
    # endregion


def _head(weights: Tensor, enough: Tensor) -> Tensor:
    """The likeliest weights in order, as many as hold enough in every row. To sort a whole vocabulary costs many times
    as much, so that comes last, and to look whether it is needed is worth a wait for the device."""
    count, vocab = HEAD, weights.shape[1]
    while True:
        head = weights.topk(min(count, vocab)).values
        if count >= vocab or not (head.sum(-1, keepdim=True, dtype=torch.float64) < enough).any():
            return head
        count *= 16


def draw(weights: Tensor, uniforms: Tensor) -> Tensor:
    """The token of each row where the running sum of weights passes uniform * total. weights: [rows, vocab].

    A token without weight is never drawn. A row of NaN draws something, which nobody should use.
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
    targets -= sums.gather(-1, block) - masses.gather(-1, block)  # what is left of it inside the block
    inside = blocks[torch.arange(len(blocks), device=block.device), block[:, 0]]
    token = _first_past(inside.cumsum(-1, dtype=torch.float64), targets)
    return (block * BLOCK + token)[:, 0].clamp_(max=vocab - 1)


def _first_past(sums: Tensor, targets: Tensor) -> Tensor:
    """The first place of each row, [rows, 1], where the sum so far is past the target. Nothing is past NaN: the clamp
    keeps the answer of such a row a valid index."""
    return torch.searchsorted(sums, targets, right=True).clamp_(max=sums.shape[1] - 1)

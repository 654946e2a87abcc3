"""Draws a token for each row of logits: the interface and the reference.

    temperature -> min_p -> top_k -> top_p -> exponential race

Each filter works on the tokens left by the one before, and none splits a tie: equal logits are all kept or all removed.

The draw is a race: each token arrives after a random time, exponentially distributed with its weight as the rate, and
the first wins, with the probability of its weight (the Gumbel-max trick without its logarithms). The times are a pure
function of the request's key, the token's position and the token's id. So a row draws the same token alone and in any
batch, however the vocabulary is split, and no pass needs the sum of the weights.

All backends draw the same token, to the last bit. The random numbers are integers; a sum of weights is a sum of
integers, exact in any order; and weights and times take float32 additions, multiplications and divisions that are
rounded one by one, in the order written here. Only a compiler that fuses or reorders them changes a draw.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class SamplingInputs(NamedTuple):
    """The sampling parameters of each row."""

    keys: Tensor  # [rows] int64; the seed of the row's request
    positions: Tensor  # [rows] int64; where the drawn token will be in its request
    top_k: Tensor  # [rows] int32; 0: off
    temperatures: Tensor  # [rows] float32; 0: greedy, the lowest id of the largest logits
    top_p: Tensor  # [rows] float32; 1: off
    min_p: Tensor  # [rows] float32; 0: off


# logits [rows, vocab], parameters, num_tokens -> tokens [rows] int64, peaks [rows] float32. Ids from num_tokens on are
# never drawn. A peak is the largest logit, or NaN if any is; a row whose peak is not finite has token 0.
Draw = Callable[[Tensor, SamplingInputs, int], tuple[Tensor, Tensor]]

LOG2_E, LN_2 = (float(torch.tensor(number)) for number in (math.log2(math.e), math.log(2)))  # rounded to float32
WHOLE = 2.0**32  # the likeliest token's weight as an integer. Sums over vocabularies up to 2^21 are exact in float64
# 2^x = sum of EXP2[i] x^i for |x| <= 1/2; -log(1 - x) / x = sum of LOG[i] x^i for 0 <= x <= 1/2. To float32's precision
EXP2 = (1.0, 0.6931471824645996, 0.24022647738456726, 0.055503323674201965, 0.00961843691766262,
        0.0013398875016719103, 0.00015353361959569156)  # fmt: skip
LOG = (1.0, 0.49999284744262695, 0.33370059728622437, 0.24280516803264618, 0.26961198449134827, -0.20353569090366364,
       1.257662057876587, -1.6958024501800537, 1.4411031007766724)  # fmt: skip


# region exercise 2.21
def reference(logits: Tensor, params: SamplingInputs, num_tokens: int) -> tuple[Tensor, Tensor]:
    """Draw a token for each row by a race, and return the tokens and the peaks, see `Draw`. A token arrives at its time
    in `arrivals(numbers(...))` divided by its weight; the first one wins. Greedy rows take the largest logit."""
    logits = logits[:, :num_tokens].float()
    peaks = logits.amax(-1)
    weights = keep(logits, weigh(logits, peaks, params.temperatures), params)
    first = (weights / arrivals(numbers(params.keys, params.positions, num_tokens))).argmax(-1)
    tokens = torch.where(params.temperatures > 0, first, logits.argmax(-1))
    return torch.where(peaks.isfinite(), tokens, 0), peaks


def keep(logits: Tensor, weights: Tensor, params: SamplingInputs) -> Tensor:
    """Zero the weights of the tokens that a filter removes, each row by its own parameters.

    A filter is off at top_k = 0, top_p >= 1 or min_p = 0, and never splits a tie. For top-p, weights are added as whole
    numbers, `(weights * WHOLE).floor().double()`: their sum is the same in any order, so all backends agree.
    """
    weights = torch.where(weights >= params.min_p[:, None], weights, 0)
    ranked, order = logits.sort(-1, descending=True)
    k = torch.where(params.top_k > 0, params.top_k, logits.shape[1]).clamp(max=logits.shape[1])
    weights = torch.where(logits >= ranked.gather(-1, k.long()[:, None] - 1), weights, 0)
    sums = (weights * WHOLE).floor().double().gather(-1, order).cumsum(-1)  # each token with the likelier ones
    enough = sums[:, -1:] * params.top_p.double()[:, None]
    last = (sums < enough).sum(-1, keepdim=True)  # the first token that reaches it
    in_nucleus = (logits >= ranked.gather(-1, last)) | (params.top_p >= 1)[:, None]
    return torch.where(in_nucleus, weights, 0)


# endregion


def weigh(logits: Tensor, peaks: Tensor, temperatures: Tensor) -> Tensor:
    """e^((logit - peak) / temperature): the weight of each token, from 0 to the likeliest one's 1."""
    # A number / a tensor would be multiplied by the reciprocal, which is rounded twice.
    scales = torch.full_like(temperatures, LOG2_E) / torch.where(temperatures > 0, temperatures, 1)
    return exp2((logits - peaks[:, None]) * scales[:, None])


def exp2(x: Tensor) -> Tensor:
    """2^x for x <= 0: a polynomial for the fraction, exponent bits for the integer. 0 below 2^-126.5."""
    near = x.clamp(min=-127)
    whole = (near + 0.5).floor()
    return horner(EXP2, near - whole) * ((whole.int() + 127) << 23).view(torch.float32)


def horner(coefficients: tuple[float, ...], x: Tensor) -> Tensor:
    result = torch.full_like(x, coefficients[-1])
    for coefficient in coefficients[-2::-1]:
        result = result * x + coefficient
    return result


def arrivals(numbers: Tensor) -> Tensor:
    """Exponentially distributed numbers from random bits: -log(1 - v) of a uniform v > 0."""
    v = ((shift(numbers, 1) | 1).float() * 2.0**-63).clamp(max=1 - 2.0**-24)
    # 1 - v is 2^-halvings * (1 - f). For small v, where 1 - v would be rounded, f is v itself
    bits = (1 - v).view(torch.int32)
    halvings = (126 - (bits >> 23)).clamp(min=0)
    f = torch.where(halvings == 0, v, 1 - (bits + (halvings << 23)).view(torch.float32))
    return halvings.float() * LN_2 + horner(LOG, f) * f


def signed(number: int) -> int:
    """The 64 bits of a number as torch's int64."""
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)


STRIDE = signed(0x9E3779B97F4A7C15)  # 2^64 divided by the golden ratio: multiples of it spread evenly


def numbers(keys: Tensor, positions: Tensor, tokens: int) -> Tensor:
    """64 random bits for each token of each row, [rows, tokens]: token i has number i + 1 of a SplitMix64 sequence.

    The key is mixed before the position is added, and both before the token, so that neighbours are unrelated.
    """
    starts = mix(mix(keys + STRIDE) + positions * STRIDE)
    return mix(starts[:, None] + torch.arange(1, tokens + 1, device=keys.device) * STRIDE)


def mix(number: Tensor) -> Tensor:
    """The finalizer of SplitMix64: a bijection on 64 bits in which every input bit affects every output bit."""
    number = (number ^ shift(number, 30)) * signed(0xBF58476D1CE4E5B9)
    number = (number ^ shift(number, 27)) * signed(0x94D049BB133111EB)
    return number ^ shift(number, 31)


def shift(number: Tensor, places: int) -> Tensor:
    """Shift to the right as if int64 had no sign."""
    return (number >> places) & ((1 << (64 - places)) - 1)

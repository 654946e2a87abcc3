# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""The draw of a token from each row of logits on a GPU, in four launches, each with a grid of shapes alone.

launch  a program  writes
maxima  per tile   maxima: the largest logit of each block of tokens
bound   per row    peaks, tokens of greedy rows, and of filters the bounds: no token below is kept
scan    per tile   without filters races: the winner of each tile. With them candidates: the tokens that reach the
                   bound, counts: how many do, and masses: the weight of all tokens
choose  per row    tokens: the winner of all tiles, or of a race over the candidates that the filters keep

The file begins with the Gumbel maximum: from `race` to `mix`, it is all that a row without filters needs. A row is read
twice, and its tiles by many programs, so that one row keeps more than one multiprocessor busy. A filter searches its
threshold among the candidates. If these are too many, or too few for the nucleus, one program searches the whole row,
some 16 passes for 16-bit logits. Nothing is read on the host: the launches can be captured.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from phase2_prefill_decode.kernels import draw as interface
from phase2_prefill_decode.kernels.draw import SamplingInputs

BLOCK = 256  # tokens that share a maximum
TILE = 2048  # tokens of a program of maxima and scan
SEARCH = 1024  # tokens, or maxima, at a time in bound and choose
ROW_CANDIDATES = 4096  # the rest of them is not stored
OPTIONS: dict[str, Any] = {"num_warps": 8, "enable_fp_fusion": False}  # fused, a product would be rounded once less
PARAMETERS = ["temperatures", "top_k", "top_p", "min_p", "keys", "positions"]  # views of one upload, not aligned

INFINITY, NAN = tl.constexpr(0x7F800000), tl.constexpr(0x7FC00000)  # their bits, which are their order
LOWEST = tl.constexpr(-0x7F800000)  # the order of the lowest finite number
LAST = tl.constexpr(0x7FFFFFFF)
LOG2_E, LN_2, WHOLE = (tl.constexpr(number) for number in (interface.LOG2_E, interface.LN_2, interface.WHOLE))
E0, E1, E2, E3, E4, E5, E6 = map(tl.constexpr, interface.EXP2)
L0, L1, L2, L3, L4, L5, L6, L7, L8 = map(tl.constexpr, interface.LOG)
STRIDE = tl.constexpr(0x9E3779B97F4A7C15)
LARGEST, UNIT = tl.constexpr(1 - 2.0**-24), tl.constexpr(2.0**-63)


@triton.jit
def race(token, weight, start):
    """Each token's score, 1 / (its time of arrival), above its id: the largest of these integers has won, and of equal
    scores the lowest id. Its chance is the token's share of the weights (the Gumbel maximum)."""
    score = tl.div_rn(weight, arrival(start, token)).to(tl.int32, bitcast=True)
    return (score.to(tl.int64) << 32) | (LAST - token)


@triton.jit
def winner(raced):
    return LAST - (raced & LAST)


@triton.jit
def arrival(start, token):
    """An exponentially distributed number for each token: -log(1 - v) of a uniform v > 0."""
    number = mix(start + (token + 1).to(tl.uint64) * STRIDE)
    v = tl.minimum(((number >> 1) | 1).to(tl.int64).to(tl.float32) * UNIT, LARGEST)
    bits = (1.0 - v).to(tl.int32, bitcast=True)
    halvings = tl.maximum(126 - (bits >> 23), 0)
    f = tl.where(halvings == 0, v, 1.0 - (bits + (halvings << 23)).to(tl.float32, bitcast=True))
    series = (((((((L8 * f + L7) * f + L6) * f + L5) * f + L4) * f + L3) * f + L2) * f + L1) * f + L0
    return halvings.to(tl.float32) * LN_2 + series * f


@triton.jit
def start_of(keys, positions, row):
    """The random bits of a row: a hash of its request's key and the position."""
    key, position = tl.load(keys + row).to(tl.uint64), tl.load(positions + row).to(tl.uint64)
    return mix(mix(key + STRIDE) + position * STRIDE)


@triton.jit
def mix(number):
    """The finalizer of SplitMix64."""
    number = (number ^ (number >> 30)) * 0xBF58476D1CE4E5B9
    number = (number ^ (number >> 27)) * 0x94D049BB133111EB
    return number ^ (number >> 31)


@triton.jit
def weigh(x, peak, scale):
    """2^((x - peak) * scale), from 0 to 1."""
    near = tl.maximum((x - peak) * scale, -127.0)
    whole = tl.floor(near + 0.5)
    rest = near - whole
    power = (((((E6 * rest + E5) * rest + E4) * rest + E3) * rest + E2) * rest + E1) * rest + E0
    return power * ((whole.to(tl.int32) + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def order(x):
    """An integer that grows with the number, the same for 0 and -0, and largest for NaN."""
    bits = x.to(tl.int32, bitcast=True)
    ordered = tl.where(x == 0, 0, bits ^ ((bits >> 31) & 0x7FFFFFFF))
    return tl.where(x == x, ordered, NAN)


@triton.jit
def number_of(order):
    """The number of an order."""
    return (order ^ ((order >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def filters_of(top_k, top_p, row, vocab):
    """k, or 0 if it removes nothing, and p."""
    k = tl.load(top_k + row)
    return tl.where(k < vocab, k, 0), tl.load(top_p + row)


@triton.jit(do_not_specialize=["vocab", "blocks"])
def maxima_kernel(
    logits,  # [rows, stride]
    stride,
    vocab,
    readable,  # `vocab`, or the multiple of 16 above it if rows are that long: then loads are wide
    maxima,  # [rows, blocks] float32
    blocks,
    block_size: tl.constexpr,
    tile: tl.constexpr,
):
    """Each program takes one tile of a row."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    block = part * (tile // block_size) + tl.arange(0, tile // block_size)
    token = block[:, None] * block_size + tl.arange(0, block_size)
    x = tl.load(logits + row * stride + token, mask=token < readable, other=-float("inf")).to(tl.float32)
    most = tl.max(order(tl.where(token < vocab, x, -float("inf"))), 1)
    tl.store(maxima + row * blocks + block, number_of(most), mask=block < blocks)


@triton.jit(do_not_specialize=["vocab", "blocks"], do_not_specialize_on_alignment=PARAMETERS[:3])
def bound_kernel(
    logits, stride, vocab, maxima, blocks, temperatures, top_k, top_p,
    peaks,  # [rows] float32
    bounds,  # [rows] int32: the order of the smallest candidate
    counts,  # [rows] int32: of candidates
    masses,  # [rows] int64: the sum of all weights
    tokens,  # [rows] int64
    block_size: tl.constexpr, tile: tl.constexpr,
):  # fmt: skip
    """Each program takes one row."""
    row = tl.program_id(0).to(tl.int64)
    maxima += row * blocks
    most = tl.full([tile], LOWEST - 1, tl.int32)
    for first in range(0, blocks, tile):
        block = first + tl.arange(0, tile)
        most = tl.maximum(most, order(tl.load(maxima + block, mask=block < blocks, other=-float("inf"))))
    top = tl.max(most, 0)
    peak = number_of(top)
    tl.store(peaks + row, peak)
    tl.store(counts + row, 0)
    tl.store(masses + row, 0)
    token = tl.full((), 0, tl.int32)
    if (top < INFINITY) & (top >= LOWEST):
        if tl.load(temperatures + row) == 0:
            where = tl.full([tile], LAST, tl.int32)
            for first in range(0, blocks, tile):
                block = first + tl.arange(0, tile)
                reaches = tl.load(maxima + block, mask=block < blocks, other=-float("inf")) == peak
                where = tl.minimum(where, tl.where(reaches, block, LAST))
            inside = tl.min(where, 0) * block_size + tl.arange(0, block_size)
            x = tl.load(logits + row * stride + inside, mask=inside < vocab, other=-float("inf")).to(tl.float32)
            token = tl.min(tl.where(x == peak, inside, LAST), 0)
        else:
            k, p = filters_of(top_k, top_p, row, vocab)
            reach = tl.where(k > 0, k, blocks - blocks // 8)  # without top-k: enough for the most nuclei
            low = tl.full((), LOWEST, tl.int32)
            if ((k > 0) | (p < 1)) & (reach <= blocks):
                low = search((maxima, None, blocks), None, low, top, reach, 0, tile)
            tl.store(bounds + row, low)
    tl.store(tokens + row, token)


@triton.jit(do_not_specialize=["vocab"], do_not_specialize_on_alignment=PARAMETERS)
def scan_kernel(
    logits, stride, vocab, readable, temperatures, top_k, top_p, min_p, keys, positions, peaks, bounds, counts, masses,
    candidates,  # [rows, most] int32
    races,  # [rows, tiles] int64: the winner of each tile
    most: tl.constexpr, tile: tl.constexpr,
):  # fmt: skip
    """Each program takes one tile of a row."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    temperature, peak = tl.load(temperatures + row), tl.load(peaks + row)
    if (temperature > 0) & (tl.abs(peak) < float("inf")):
        token = part * tile + tl.arange(0, tile)
        x = tl.load(logits + row * stride + token, mask=token < readable, other=-float("inf")).to(tl.float32)
        x = tl.where(token < vocab, x, -float("inf"))
        weight = weigh(x, peak, tl.div_rn(LOG2_E, temperature))
        weight = tl.where(weight >= tl.load(min_p + row), weight, 0.0)
        k, p = filters_of(top_k, top_p, row, vocab)
        if (k == 0) & (p >= 1):
            raced = race(token, weight, start_of(keys, positions, row))
            tl.store(races + row * tl.num_programs(1) + part, tl.max(raced, 0))
        else:
            if k == 0:
                tl.atomic_add(masses + row, tl.sum((weight * WHOLE).to(tl.int64), 0))
            reaches = (x >= number_of(tl.load(bounds + row))).to(tl.int32)
            number = tl.sum(reaches, 0)
            if number > 0:
                place = tl.atomic_add(counts + row, number) + tl.cumsum(reaches, 0) - 1
                tl.store(candidates + row * most + place, token, mask=(reaches > 0) & (place < most))


@triton.jit(do_not_specialize=["vocab", "tiles"], do_not_specialize_on_alignment=PARAMETERS)
def choose_kernel(
    logits, stride, vocab, temperatures, top_k, top_p, min_p, keys, positions, peaks, bounds, counts, masses,
    candidates, races, tiles, tokens, most: tl.constexpr, shift: tl.constexpr, tile: tl.constexpr,
):  # fmt: skip
    """Each program takes one row."""
    row = tl.program_id(0).to(tl.int64)
    temperature, peak = tl.load(temperatures + row), tl.load(peaks + row)
    if (temperature > 0) & (tl.abs(peak) < float("inf")):
        k, p = filters_of(top_k, top_p, row, vocab)
        start = start_of(keys, positions, row)
        if (k == 0) & (p >= 1):
            raced = tl.zeros([tile], tl.int64)
            for first in range(0, tiles, tile):
                part = first + tl.arange(0, tile)
                raced = tl.maximum(raced, tl.load(races + row * tiles + part, mask=part < tiles, other=0))
            token = winner(tl.max(raced, 0))
        else:
            x, count, total = logits + row * stride, tl.load(counts + row), tl.load(masses + row)
            chosen, whole = (x, candidates + row * most, count), (x, None, vocab)
            weighing = peak, tl.div_rn(LOG2_E, temperature), tl.load(min_p + row)
            low, top = tl.load(bounds + row), order(peak)
            is_enough = count <= most
            if is_enough & (k == 0):
                mass = summed(chosen, weighing, low, tile)
                is_enough = mass.to(tl.float64) >= total.to(tl.float64) * p.to(tl.float64)
            if is_enough:
                token = filtered(chosen, weighing, low, top, k, p, total, start, shift, tile)
            else:
                low = tl.full((), LOWEST, tl.int32)
                token = filtered(whole, weighing, low, top, k, p, total, start, shift, tile)
        tl.store(tokens + row, token)


@triton.jit
def filtered(source, weighing, low, top, k, p, total, start, shift: tl.constexpr, tile: tl.constexpr):
    """The winner among the tokens of the source that the filters keep."""
    if k > 0:
        low = search(source, None, low, top, k, shift, tile)
        if p < 1:
            total = summed(source, weighing, low, tile)
    if p < 1:
        low = search(source, weighing, low, top, total.to(tl.float64) * p.to(tl.float64), shift, tile)
    raced = tl.zeros([tile], tl.int64)
    for first in range(0, source[2], tile):
        token, number = numbers_from(source, first, tile)
        raced = tl.maximum(raced, race(token, weight_of(number, low, weighing), start))
    return winner(tl.max(raced, 0))


@triton.jit
def search(source, weighing, low, top, enough, shift: tl.constexpr, tile: tl.constexpr):
    """The threshold: the largest order such that the numbers from there on are enough, or weigh enough. It is from
    `low`, which is known to be one, to `top`. With 16-bit numbers, only orders that differ in the upper bits matter."""
    # region exercise 2.22
    low, above = (low >> shift).to(tl.int64), (top >> shift).to(tl.int64) + 1
    while above - low > 1:
        middle = (low + above) >> 1
        if summed(source, weighing, (middle << shift).to(tl.int32), tile).to(tl.float64) >= enough:
            low = middle
        else:
            above = middle
    return (low << shift).to(tl.int32)
    # endregion


@triton.jit
def summed(source, weighing, low, tile: tl.constexpr):
    """How many numbers of the source reach `low` or, with a weighing, the sum of their weights as whole numbers."""
    sums = tl.zeros([tile], tl.int64)
    for first in range(0, source[2], tile):
        _, number = numbers_from(source, first, tile)
        if weighing is None:
            sums += (number >= number_of(low)).to(tl.int64)
        else:
            sums += (weight_of(number, low, weighing) * WHOLE).to(tl.int64)
    return tl.sum(sums, 0)


@triton.jit
def weight_of(number, low, weighing):
    """The weight, or 0 below `low` or the least that min-p keeps. A weighing: the peak, the scale, the least weight."""
    weight = weigh(number, weighing[0], weighing[1])
    return tl.where((number >= number_of(low)) & (weight >= weighing[2]), weight, 0.0)


@triton.jit
def numbers_from(source, first, tile: tl.constexpr):
    """Ids and numbers of the next tokens; -inf past the last. A source: numbers, ids of some or None, their count."""
    numbers, ids, count = source
    token = first + tl.arange(0, tile)
    mask = token < count
    if ids is not None:
        token = tl.load(ids + token, mask=mask, other=0)
    return token, tl.load(numbers + token, mask=mask, other=-float("inf")).to(tl.float32)


SHIFTS = {torch.float32: 0, torch.bfloat16: 16, torch.float16: 13}  # lower bits that a number of this type never has


def draw(logits: Tensor, params: SamplingInputs, num_tokens: int) -> tuple[Tensor, Tensor]:
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    rows, stride = len(logits), logits.stride(0)
    blocks, tiles = triton.cdiv(num_tokens, BLOCK), triton.cdiv(num_tokens, TILE)
    tokens, masses = (logits.new_empty(rows, dtype=torch.int64) for _ in range(2))
    counts, bounds = (logits.new_empty(rows, dtype=torch.int32) for _ in range(2))
    peaks, maxima = (logits.new_empty(shape, dtype=torch.float32) for shape in (rows, (rows, blocks)))
    candidates = logits.new_empty((rows, ROW_CANDIDATES), dtype=torch.int32)
    races = logits.new_empty((rows, tiles), dtype=torch.int64)
    if rows == 0:
        return tokens, peaks
    readable = triton.cdiv(num_tokens, 16) * 16 if stride % 16 == 0 else num_tokens
    filters = params.temperatures, params.top_k, params.top_p, params.min_p, params.keys, params.positions
    with torch.cuda.device(logits.get_device()):
        maxima_kernel[rows, tiles](logits, stride, num_tokens, readable, maxima, blocks, BLOCK, TILE, **OPTIONS)
        bound_kernel[(rows,)](
            logits, stride, num_tokens, maxima, blocks, *filters[:3], peaks, bounds, counts, masses,
            tokens, block_size=BLOCK, tile=SEARCH, **OPTIONS,
        )  # fmt: skip
        scan_kernel[rows, tiles](
            logits, stride, num_tokens, readable, *filters, peaks, bounds, counts, masses, candidates, races,
            most=ROW_CANDIDATES, tile=TILE, **OPTIONS,
        )  # fmt: skip
        choose_kernel[(rows,)](
            logits, stride, num_tokens, *filters, peaks, bounds, counts, masses, candidates, races, tiles, tokens,
            most=ROW_CANDIDATES, shift=SHIFTS[logits.dtype], tile=SEARCH, **OPTIONS,
        )  # fmt: skip
    return tokens, peaks

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""The draw of a token from each row of logits on a CPU: threads take rows.

A filter is a threshold of the logits, found by bisection, as on a GPU. Then all tokens of the row race.
"""

from functools import cache

import numpy as np
import torch
from numba.np.unsafe.ndarray import to_fixed_tuple
from torch import Tensor

from phase2_prefill_decode.extras.cpu.intrinsics import FAST, TAGS, array, as_bits, as_float, compiled, exp2, widen
from phase2_prefill_decode.extras.cpu.openmp import OPENMP, address_of, launch, take, threads_for
from phase2_prefill_decode.kernels import draw as interface
from phase2_prefill_decode.kernels.draw import SamplingInputs

BLOCK = 128  # tokens
FLOAT32, INT32, INT64 = np.dtype(np.float32), np.dtype(np.int32), np.dtype(np.int64)
SHIFTS = {torch.float32: 0, torch.bfloat16: 16, torch.float16: 13}  # lower bits that a number of this type never has
LOWEST = np.int64(-0x7F800000)  # the order of the lowest finite number

LOG2_E, LN_2, WHOLE = np.float32(interface.LOG2_E), np.float32(interface.LN_2), np.float32(interface.WHOLE)
LOG = tuple(map(np.float32, interface.LOG))
STRIDE = np.uint64(0x9E3779B97F4A7C15)
M1, M2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
ONE = np.float32(1)
LARGEST, UNIT = np.float32(1 - 2.0**-24), np.float32(2.0**-63)


def draw(logits: Tensor, inputs: SamplingInputs, num_tokens: int) -> tuple[Tensor, Tensor]:
    rows, logits = len(logits), logits if logits.stride(1) == 1 else logits.contiguous()
    tokens, peaks = torch.empty(rows, dtype=torch.int64), torch.empty(rows, dtype=torch.float32)
    columns = inputs.temperatures, inputs.top_k, inputs.top_p, inputs.min_p, inputs.keys, inputs.positions
    arguments = (
        logits.data_ptr(), logits.stride(0), rows, num_tokens, *(column.data_ptr() for column in columns),
        tokens.data_ptr(), peaks.data_ptr(),
    )  # fmt: skip
    threads = threads_for(rows * num_tokens / 2e3) if rows > 1 else 1
    launch(draw_body(logits.dtype), arguments, threads, OPENMP)
    return tokens, peaks


@cache
def draw_body(dtype: torch.dtype) -> int:
    like, itemsize, shift = TAGS[dtype], dtype.itemsize, SHIFTS[dtype]

    def body(work):
        (
            _, logits, stride, rows, vocab, temperatures, top_k, top_p, min_p, keys, positions, tokens, peaks,
        ) = to_fixed_tuple(array(work, (13,), INT64), 13)  # fmt: skip
        each = (rows,)
        temperatures, min_p = array(temperatures, each, FLOAT32), array(min_p, each, FLOAT32)
        top_k, top_p = array(top_k, each, INT32), array(top_p, each, FLOAT32)
        keys, positions = array(keys, each, INT64), array(positions, each, INT64)
        tokens, peaks = array(tokens, each, INT64), array(peaks, each, FLOAT32)
        amounts = np.empty(vocab, np.float32)
        row = take(work)
        while row < rows:
            x = array(logits + row * stride * itemsize, (vocab,), like)
            peak = largest(x)
            peaks[row], tokens[row] = np.float32(np.nan) if has_nan(x) else peak, 0
            if -np.inf < peaks[row] < np.inf:
                if temperatures[row] > 0:
                    scale = LOG2_E / temperatures[row]
                    low = threshold(x, amounts, peak, scale, top_k[row], top_p[row], min_p[row], shift)
                    tokens[row] = race(x, peak, scale, min_p[row], low, start_of(keys[row], positions[row]))
                else:
                    tokens[row] = first_of(x, peak)
            row = take(work)

    return address_of(body)


@compiled(fastmath=FAST | {"nnan"})
def largest(x):
    """The maximum. It may ignore a NaN, which lets the compiler vectorize."""
    most = np.float32(-np.inf)
    for i in range(len(x)):
        most = max(most, widen(x[i]))
    return most


@compiled()
def has_nan(x):
    count = 0
    for i in range(len(x)):
        number = widen(x[i])
        count += number != number
    return count > 0


@compiled()
def first_of(x, peak):
    """The lowest id of the largest logits."""
    first = len(x)
    for i in range(len(x)):
        first = min(first, i if widen(x[i]) == peak else len(x))
    return first


# Filters.


@compiled()
def threshold(x, amounts, peak, scale, k, p, min_p, shift):
    """The smallest logit that top-k and top-p keep."""
    low, top = LOWEST, order(peak)
    if 0 < k < len(x):
        low = search(x, amounts, low, top, np.float64(k), True, shift)
    if p < ONE:
        weigh_all(x, peak, scale, min_p, amounts)
        low = search(x, amounts, low, top, mass(x, amounts, number_of(low)) * np.float64(p), False, shift)
    return number_of(low)


@compiled()
def search(x, amounts, low, top, enough, counting, shift):
    """The largest order such that the numbers from there on are enough, or weigh enough. It is from `low` to `top`."""
    low, above = low >> shift, (top >> shift) + 1
    while above - low > 1:
        middle = (low + above) >> 1
        number = number_of(middle << shift)
        sums = count(x, number) if counting else mass(x, amounts, number)
        if sums >= enough:
            low = middle
        else:
            above = middle
    return low << shift


@compiled()
def count(x, low):
    """How many numbers reach `low`."""
    total = np.int32(0)
    for i in range(len(x)):
        total += np.int32(widen(x[i]) >= low)
    return np.float64(total)


@compiled()
def mass(x, amounts, low):
    """The sum of their amounts: of whole numbers, so exact in any order."""
    total = 0.0
    for i in range(len(x)):
        total += np.float64(amounts[i]) if widen(x[i]) >= low else 0.0
    return total


@compiled()
def order(number):
    """An integer that grows with the number."""
    bits = np.int32(as_bits(number))
    return np.int64(bits ^ ((bits >> np.int32(31)) & np.int32(0x7FFFFFFF)))


@compiled()
def number_of(order):
    """The number of an order."""
    bits = np.int32(order)
    return as_float(np.uint32(bits ^ ((bits >> np.int32(31)) & np.int32(0x7FFFFFFF))))


# Arithmetic that is rounded as written: without `fastmath`, which would fuse and reorder.


@compiled(fastmath=False)
def weigh_all(x, peak, scale, min_p, amounts):
    """The weight of each token as a whole number; 0 if min_p removes it."""
    for i in range(len(x)):
        weight = weigh(widen(x[i]), peak, scale)
        amounts[i] = np.floor(weight * WHOLE) if weight >= min_p else np.float32(0)


@compiled(fastmath=False)
def race(x, peak, scale, min_p, low, start):
    """The token of the largest score among those that the filters keep; of equal scores, the lowest id."""
    best, token, scores = np.float32(-1), np.int64(0), np.empty(BLOCK, np.float32)
    for first in range(0, len(x), BLOCK):
        part = x[first : first + BLOCK]
        for i in range(len(part)):
            number = widen(part[i])
            weight = weigh(number, peak, scale)
            score = weight / arrival(random_bits(start, first + i))
            scores[i] = score if number >= low and weight >= min_p else np.float32(0)
        top = largest(scores[: len(part)])
        if top > best:
            best, token = top, np.int64(first + first_of(scores[: len(part)], top))
    return token


@compiled(fastmath=False)
def weigh(x, peak, scale):
    """2^((x - peak) * scale), from 0 to 1."""
    return exp2((x - peak) * scale)


@compiled(fastmath=False)
def arrival(number):
    """An exponentially distributed number: -log(1 - v) of a uniform v > 0."""
    v = min(np.float32(np.int64(number >> np.uint64(1)) | 1) * UNIT, LARGEST)
    bits = np.int32(as_bits(ONE - v))
    halvings = max(np.int32(126) - (bits >> np.int32(23)), np.int32(0))
    f = v if halvings == 0 else ONE - as_float(np.uint32(bits + (halvings << np.int32(23))))
    series = LOG[8]
    for i in range(7, -1, -1):
        series = series * f + LOG[i]
    return np.float32(halvings) * LN_2 + series * f


@compiled()
def mix(number):
    """The finalizer of SplitMix64."""
    number = (number ^ (number >> np.uint64(30))) * M1
    number = (number ^ (number >> np.uint64(27))) * M2
    return number ^ (number >> np.uint64(31))


@compiled()
def start_of(key, position):
    return mix(mix(np.uint64(key) + STRIDE) + np.uint64(position) * STRIDE)


@compiled()
def random_bits(start, token):
    return mix(start + np.uint64(token + 1) * STRIDE)

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""The draw of a token from each row of logits on a CPU: threads take rows.

A first pass finds the largest logit of each block of tokens: the peak is among them. They also bound the filters: at
least k tokens reach the k-th largest of the maxima, so top-k need not look below it.
"""

from functools import cache

import numpy as np
import torch
from numba import types
from numba.extending import overload
from numba.np.unsafe.ndarray import to_fixed_tuple
from torch import Tensor

from phase2_prefill_decode.kernels import draw as interface
from phase2_prefill_decode.kernels.cpu.intrinsics import TAGS, array, as_bits, as_float, compiled, widen
from phase2_prefill_decode.kernels.cpu.openmp import OPENMP, launch, on_each_thread, take, threads_for
from phase2_prefill_decode.sampling.inputs import SamplingInputs

BLOCK = 128  # tokens
FLOAT32, INT32, INT64 = np.dtype(np.float32), np.dtype(np.int32), np.dtype(np.int64)
SIGNED = {torch.float32: np.int32(0), torch.bfloat16: np.int16(0), torch.float16: np.int16(0)}
INFINITY = {torch.float32: 0x7F800000, torch.bfloat16: 0x7F80, torch.float16: 0x7C00}  # its bits, and its order

LOG2_E, LN_2, WHOLE = np.float32(interface.LOG2_E), np.float32(interface.LN_2), np.float32(interface.WHOLE)
EXP2, LOG = tuple(map(np.float32, interface.EXP2)), tuple(map(np.float32, interface.LOG))
STRIDE = np.uint64(0x9E3779B97F4A7C15)
M1, M2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
HALF, ONE = np.float32(0.5), np.float32(1)
LARGEST, UNIT = np.float32(1 - 2.0**-24), np.float32(2.0**-63)
COARSE, SAFE = np.float32(2.0**-31), np.float32(1 - 1e-5)


def draw(logits: Tensor, params: SamplingInputs, num_tokens: int) -> tuple[Tensor, Tensor]:
    rows, logits = len(logits), logits if logits.stride(1) == 1 else logits.contiguous()
    tokens, peaks = torch.empty(rows, dtype=torch.int64), torch.empty(rows, dtype=torch.float32)
    inputs = params.temperatures, params.top_k, params.top_p, params.min_p, params.keys, params.positions
    arguments = (
        logits.data_ptr(), logits.stride(0), rows, num_tokens, *(of.data_ptr() for of in inputs),
        tokens.data_ptr(), peaks.data_ptr(),
    )  # fmt: skip
    threads = threads_for(rows * num_tokens / 2e3) if rows > 1 else 1
    launch(draw_body(logits.dtype), arguments, 0.0, threads, OPENMP)
    return tokens, peaks


@cache
def draw_body(dtype: torch.dtype) -> int:
    like, signed, infinity, itemsize = TAGS[dtype], SIGNED[dtype], INFINITY[dtype], dtype.itemsize

    def body(work):
        (
            _, logits, stride, rows, vocab, temperatures, top_k, top_p, min_p, keys, positions, tokens, peaks, _,
        ) = to_fixed_tuple(array(work, (14,), INT64), 14)  # fmt: skip
        each = (rows,)
        temperatures, min_p = array(temperatures, each, FLOAT32), array(min_p, each, FLOAT32)
        top_k, top_p = array(top_k, each, INT32), array(top_p, each, FLOAT32)
        keys, positions = array(keys, each, INT64), array(positions, each, INT64)
        tokens, peaks = array(tokens, each, INT64), array(peaks, each, FLOAT32)
        maxima = np.empty((vocab + BLOCK - 1) // BLOCK, np.int32)
        row = take(work)
        while row < rows:
            address, temperature = logits + row * stride * itemsize, temperatures[row]
            x, x_bits = array(address, (vocab,), like), array(address, (vocab,), signed)
            has_nan = find_maxima(x_bits, infinity, maxima)
            top = highest(maxima)
            likeliest = first_of(x_bits, maxima, top)
            peaks[row] = np.float32(np.nan) if has_nan else widen(x[likeliest])
            is_finite = not has_nan and -infinity <= top < infinity
            tokens[row] = likeliest if is_finite else 0
            if is_finite and temperature > 0:
                start = start_of(keys[row], positions[row])
                of_row = peaks[row], LOG2_E / temperature, min_p[row], start
                if 0 < top_k[row] < vocab or top_p[row] < ONE:
                    filters = top_k[row], top_p[row], -infinity, top + 1
                    tokens[row] = draw_filtered(x, x_bits, maxima, of_row, *filters)
                else:
                    tokens[row] = draw_all(x, of_row)
            row = take(work)

    return on_each_thread(body)


def order(bits):
    """A signed integer that grows with the number of which these are the bits."""
    raise NotImplementedError("only inside compiled functions")


@overload(order)
def _order(bits):
    kind, sign, rest = (np.int16, 15, 0x7FFF) if bits == types.int16 else (np.int32, 31, 0x7FFFFFFF)
    return lambda bits: kind(bits ^ kind(kind(bits >> kind(sign)) & kind(rest)))


@compiled()
def find_maxima(bits, infinity, maxima):
    """Store the order of each block's largest number, the same for 0 and -0. Returns whether there is a NaN: it is
    above infinity, or below -infinity, as its sign is."""
    has_nan = False
    for block in range(len(maxima)):
        part = bits[block * BLOCK : (block + 1) * BLOCK]
        most = least = order(part[0])
        for i in range(len(part)):
            most, least = max(most, order(part[i])), min(least, order(part[i]))
        maxima[block] = most + (most == -1)
        has_nan |= most > infinity or least < -infinity - 1
    return has_nan


@compiled()
def highest(maxima):
    """The largest of them: what numba compiles for `max()` takes half a second."""
    top = maxima[0]
    for one in maxima:
        top = max(top, one)
    return top


@compiled()
def first_of(bits, maxima, top):
    """The lowest id of the largest logits."""
    block = 0
    while maxima[block] != top:
        block += 1
    i = block * BLOCK
    while order(bits[i]) + (order(bits[i]) == -1) != top:
        i += 1
    return i


# Arithmetic that is rounded as written: without `fastmath`, which would fuse and reorder.


@compiled(fastmath=False)
def weigh(x, peak, scale):
    """2^((x - peak) * scale), from 0 to 1."""
    near = max((x - peak) * scale, np.float32(-127))
    whole = np.floor(near + HALF)
    rest = near - whole
    power = EXP2[6]
    power = power * rest + EXP2[5]
    power = power * rest + EXP2[4]
    power = power * rest + EXP2[3]
    power = power * rest + EXP2[2]
    power = power * rest + EXP2[1]
    power = power * rest + EXP2[0]
    return power * as_float(np.uint32(np.int32(whole) + np.int32(127)) << np.uint32(23))


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
def number_of(start, token):
    return mix(start + np.uint64(token + 1) * STRIDE)


@compiled()
def may_win(weight, number, best):
    """Whether a token may arrive before the best one. It takes no logarithm: -log(1 - v) is at least v."""
    return weight > best * (np.float32(np.int32(number >> np.uint64(33))) * COARSE * SAFE)


@compiled()
def draw_all(x, of_row):
    """Draw among all tokens. Few blocks have a token that may win, so most are passed over at full speed."""
    peak, scale, _, start = of_row
    best, token = np.float32(0), np.int64(0)
    for first in range(0, len(x), BLOCK):
        part, candidates = x[first : first + BLOCK], 0
        for i in range(len(part)):
            candidates |= may_win(weigh(widen(part[i]), peak, scale), number_of(start, first + i), best)
        if candidates:
            for i in range(first, first + len(part)):
                best, token = race(x, i, of_row, best, token)
    return token


@compiled()
def race(x, i, of_row, best, token):
    """Let token i compete with the best so far."""
    peak, scale, min_p, start = of_row
    weight, number = weigh(widen(x[i]), peak, scale), number_of(start, i)
    if weight >= min_p and may_win(weight, number, best):
        score = weight / arrival(number)
        if score > best:
            return score, np.int64(i)
    return best, token


@compiled()
def draw_filtered(x, bits, maxima, of_row, k, p, lowest, above):
    """Draw among the tokens that the filters keep."""
    vocab = len(x)
    ids, orders, amounts = np.empty(vocab, np.int32), np.empty(vocab, np.int32), np.empty(vocab, np.float32)
    total = 0.0
    low = lowest
    if 0 < k < vocab:
        if k <= len(maxima):
            low = kth(maxima, k, lowest, above)
        count = gather_largest(x, bits, maxima, low, of_row, ids, orders, amounts)
        low = kth(orders[:count], k, low, above)
        total = mass(orders[:count], amounts, low)
    else:
        count, total = gather_heaviest(x, bits, of_row, p, ids, orders, amounts)
    if p < ONE:
        low = nucleus(orders[:count], amounts, low, above, total * np.float64(p))
    best, token = np.float32(0), np.int64(0)
    for j in range(count):
        if orders[j] >= low:
            best, token = race(x, np.int64(ids[j]), of_row, best, token)
    return token


@compiled()
def gather_largest(x, bits, maxima, low, of_row, ids, orders, amounts):
    """Collect the tokens from `low` on."""
    count = 0
    for block in range(len(maxima)):
        if maxima[block] >= low:
            for i in range(block * BLOCK, min((block + 1) * BLOCK, len(x))):
                one = order(bits[i])
                if one + (one == -1) >= low:
                    ids[count], orders[count], amounts[count] = i, one + (one == -1), amount(x[i], of_row)
                    count += 1
    return count


@compiled()
def gather_heaviest(x, bits, of_row, p, ids, orders, amounts):
    """Collect the tokens that may be in the nucleus, and sum all. Tokens of less than (1 - p) / vocab of the sum each
    make up less than 1 - p of it together: the nucleus needs none of them. 0.999 leaves room for rounding."""
    total, count = 0.0, 0
    for i in range(len(x)):
        amounts[i] = amount(x[i], of_row)
        total += np.float64(amounts[i])
    least = 0.999 * (1 - np.float64(p)) * total / len(x)
    for i in range(len(x)):
        if amounts[i] >= least:
            one = order(bits[i])
            ids[count], orders[count], amounts[count] = i, one + (one == -1), amounts[i]
            count += 1
    return count, total


@compiled()
def amount(x, of_row):
    """The weight of a token as a whole number; 0 if min_p removes it."""
    peak, scale, min_p, _ = of_row
    weight = weigh(widen(x), peak, scale)
    return np.floor(weight * WHOLE) if weight >= min_p else np.float32(0)


@compiled()
def kth(orders, k, low, above):
    """The k-th largest: the largest c that so many reach. `low` if there are fewer."""
    while above - low > 1:
        middle = (low + above) >> 1
        count = 0
        for i in range(len(orders)):
            count += orders[i] >= middle
        if count >= k:
            low = middle
        else:
            above = middle
    return low


@compiled()
def nucleus(orders, amounts, low, above, enough):
    """The largest c such that the tokens that reach it have enough weight together."""
    while above - low > 1:
        middle = (low + above) >> 1
        if mass(orders, amounts, middle) >= enough:
            low = middle
        else:
            above = middle
    return low


@compiled()
def mass(orders, amounts, low):
    total = 0.0
    for i in range(len(orders)):
        total += np.float64(amounts[i]) if orders[i] >= low else 0.0
    return total

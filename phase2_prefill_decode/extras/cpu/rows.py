# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""The rows of a product, laid out as its tiles take them: part by part, in the numbers that are multiplied with the
weight's.

Beside integers a row is rounded to 8 bits, each part with a scale of its own, as llama.cpp does it.
"""

from typing import Any

import numpy as np
import torch
from numba.extending import overload

from phase2_prefill_decode.extras.cpu.intrinsics import (
    NO_TENSOR,
    TAGS,
    array,
    as_bits,
    as_float,
    compiled,
    narrow,
    widen,
)
from phase2_prefill_decode.extras.cpu.microkernel import (
    ADDED,
    BLOCK,
    DOTS,
    HEAD,
    LINE_INPUTS,
    PAIRS,
    QUADS,
    SCALED,
    line_bytes,
)

FLOAT32, INT32, UINT64 = map(np.dtype, (np.float32, np.int32, np.uint64))
# Bytes that hold -32 to 31, which some processors multiply faster than others. The stubs of torch lack it.
INT6: torch.dtype = torch.int6  # type: ignore[attr-defined]
TINY = np.float32(2.0**-100)  # a part of a row without larger numbers is rounded to multiples of this / 127
INFINITE = np.uint32(0x7F800000)  # the bits of an infinity; those of a NaN are larger
ROUND = np.float32(1.5 * 2**23)  # a float32 plus this is rounded to a whole number


def left_tag(dtype: torch.dtype, stored: torch.dtype) -> Any:
    """The tag of what rows of a dtype are multiplied in, with a weight of another."""
    if stored in (torch.int8, INT6, torch.uint8):
        return np.int8(0) if QUADS or (PAIRS and stored != torch.int8) else np.int16(0)
    return TAGS[dtype] if DOTS and dtype == torch.bfloat16 else np.float32(0)


def sizes(kind, left_like):
    """The inputs of a line; the bytes of a line, of a line of scales, of what is before a row's numbers of a part, and
    of such a number."""
    raise NotImplementedError("only inside compiled functions")


@overload(sizes)
def _sizes(kind, left_like):
    scaled = kind in SCALED
    found = (
        LINE_INPUTS[kind],
        line_bytes(kind),
        4 * BLOCK if scaled else 0,
        HEAD if scaled else 0,
        left_like.bitwidth // 8,
    )
    return lambda kind, left_like: found


@compiled()
def lay_out(x, weight, left_like, left):
    """Write a row as tiles take it: part by part, with zeros for the inputs that a weight's layout adds. If it has
    offsets, what each of them is multiplied with comes behind."""
    kind, inputs, _, _, offsets, group, span, part, _ = weight
    place, (_, _, _, head, size) = left, sizes(kind, left_like)
    parts = inputs // group * (span // part)
    factors = array(left + parts * (head + part * size), (parts,), FLOAT32)
    for first in range(0, inputs, group):
        for start in range(0, span, part):
            count = min(part, span - start)
            factor = write_part(x[first + start : first + min(start + count, group)], kind, left_like, place, count)
            if offsets != NO_TENSOR:
                factors[first // group * (span // part) + start // part] = factor
            place += head + count * size


# region exercise 9.5
@compiled(fastmath=False)
def quantize(x, numbers):
    """Write a part of a row in 8 bits. Return its scale, and the sum of its integers. The largest in magnitude becomes
    127 or -127. If a number is not finite, the scale is NaN, and so will the products be."""
    most, total = np.uint32(0), np.int32(0)
    for i in range(len(x)):
        most = max(most, as_bits(widen(x[i])) & np.uint32(0x7FFFFFFF))
    scale = np.float32(np.nan)
    if most < INFINITE:
        largest = max(as_float(most), TINY)
        scale, inverse = largest / np.float32(127), np.float32(127) / largest
        for i in range(len(x)):
            number = np.int32(as_bits(widen(x[i]) * inverse + ROUND)) - np.int32(as_bits(ROUND))
            numbers[i] = number
            total += number
    else:
        numbers[:] = 0
    return scale, total


# endregion


@compiled()
def convert(x, numbers):
    for i in range(len(x)):
        numbers[i] = narrow(widen(x[i]), numbers[0])


@compiled()
def swap(numbers, count):
    """Exchange the second and third of each four numbers. Of a word of the weight with four numbers, the first operand
    has the first and third."""
    quads = array(numbers, (count // 4,), UINT64)
    for i in range(len(quads)):
        quad = quads[i]
        quads[i] = (
            quad & np.uint64(0xFFFF00000000FFFF)
            | (quad & np.uint64(0xFFFF0000)) << np.uint64(16)
            | (quad >> np.uint64(16)) & np.uint64(0xFFFF0000)
        )


def write_part(x, kind, left_like, place, count):
    """Write a part of a row with what is before its numbers. Return what an offset of the weight is multiplied with."""
    raise NotImplementedError("only inside compiled functions")


@overload(write_part)
def _write_part(x, kind, left_like, place, count):
    integers, scaled, added = kind in ADDED, kind in SCALED, np.int32(ADDED.get(kind, 0))
    swapped, head = scaled and left_like.bitwidth == 16, HEAD if scaled else 0

    def write(x, kind, left_like, place, count):
        numbers, scale, total = array(place + head, (count,), left_like), np.float32(1), np.int32(0)
        numbers[len(x) :] = 0
        if integers:
            scale, total = quantize(x, numbers)
        else:
            convert(x, numbers)
        if scaled:
            array(place, (1,), FLOAT32)[0] = scale
            array(place + 4, (1,), INT32)[0] = -added * total
        if swapped:
            swap(place + head, count)
        return -scale * np.float32(total)

    return write

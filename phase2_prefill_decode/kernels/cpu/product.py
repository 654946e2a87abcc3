# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""A matrix product on a CPU, of one row or thousands, with a weight that is packed once.

A packed weight is a sequence of blocks of 64 outputs, the last padded with zeros. In a block come the numbers of the
first input for all its outputs, then those of the second, and so on: one stream of memory, in the order in which it is
read. In bfloat16 an output's numbers of two inputs lie side by side, and in 4 bits they share a byte.

A thread takes a block and up to ROWS rows, and goes through the inputs in chunks. A chunk of the weight stays in the L1
cache while tile after tile of rows is multiplied with it, so few rows wait for memory, and many for arithmetic. Other
formats than bfloat16 and float32 are unpacked to one of them chunk by chunk. All their numbers are exact in it.

    integers and float8: the sum of a group of inputs is scaled, and added to the total
        total += scale * (sum of value * input - zero * sum of input)

A row's product does not depend on the other rows, nor on how many there are: see `tile`.
"""

from functools import cache

import numpy as np
import torch
from numba import types
from numba.extending import overload
from numba.np.unsafe.ndarray import to_fixed_tuple
from torch import Tensor
from torch.nn.functional import pad

from phase2_prefill_decode.kernels.cpu.intrinsics import FAST, TAGS, array, as_bits, as_float, compiled, narrow, widen
from phase2_prefill_decode.kernels.cpu.openmp import OPENMP, launch, on_each_thread, take, threads_for
from phase2_prefill_decode.kernels.cpu.tile import BLOCK, DOTS, PACKED, PAIR, VECTORS, WIDE, add_tile, unpack

ROWS = 96  # of an item of work: many enough to unpack a weight for, few enough for the L2 cache
CHUNK = 128 if DOTS else 64  # pairs of inputs: 512 bytes of a row
MOST, SPAN = 6, VECTORS if WIDE else 1  # rows and vectors of the largest tile
FLOAT32, INT64, UINT8 = (np.dtype(kind) for kind in (np.float32, np.int64, np.uint8))
NO_TENSOR = 0

# The formats that are unpacked: a tag for each, and the bytes of a pair of inputs in a block.
INT8, INT4, FLOAT8 = np.int8(0), np.uint8(0), np.uint64(0)
BYTES = PAIR | PACKED


# region block
@compiled()
def multiply_block(weight, block, left, sums, room):
    """Write the products of all rows of `left` with a block of a weight to `sums`."""
    kind, blocks, bias, scales, zeros, pairs, group = weight
    size, groups, place, width = pair_of(kind), -(-pairs // group), blocks + block * pairs * pair_of(kind), left.itemsize
    sums[:] = array(bias + block * BLOCK * 4, (BLOCK,), FLOAT32)
    for number in range(groups):
        first, end = number * group, min((number + 1) * group, pairs)
        part = sums
        if scales != NO_TENSOR:
            part = room[1][: len(sums)]
            part[:] = 0
        for start in range(first, end, CHUNK):
            steps, own = min(CHUNK, end - start), left.ctypes.data + 2 * start * width
            tag, at, ahead = ready(kind, place + start * size, steps, room[0])
            add_rows(tag, left[0, 0], part, own, left.strides[0], at, steps, ahead)
        if scales != NO_TENSOR:
            line = (block * groups + number) * BLOCK * 4
            scale, zero = array(scales + line, (BLOCK,), FLOAT32), array(zeros + line, (BLOCK,), FLOAT32)
            for row in range(len(sums)):
                add_scaled(part[row], scale, zero, total_of(left[row, 2 * first : 2 * end]), sums[row])


@compiled()
def add_rows(kind, left_kind, sums, left, down, weight, steps, ahead):
    """sums += rows @ a chunk of a block, in tiles: the largest first."""
    row = 0
    while row < len(sums):
        rest, at, own = len(sums) - row, sums[row:].ctypes.data, left + row * down
        if rest >= MOST:
            for v in range(0, VECTORS, SPAN):
                add_tile(MOST, SPAN, kind, left_kind, at + v * 64, own, down, weight + v * 64, steps, ahead)
            row += MOST
        elif rest >= 4:
            for v in range(0, VECTORS, SPAN):
                add_tile(4, SPAN, kind, left_kind, at + v * 64, own, down, weight + v * 64, steps, ahead)
            row += 4
        elif rest >= 2:
            for v in range(0, VECTORS, 2):
                add_tile(2, 2, kind, left_kind, at + v * 64, own, down, weight + v * 64, steps, ahead)
            row += 2
        else:
            add_tile(1, VECTORS, kind, left_kind, at, own, down, weight, steps, ahead)
            row += 1


# endregion


@compiled()
def total_of(numbers):
    total = np.float32(0)
    for i in range(len(numbers)):
        total += widen(numbers[i])
    return total


@compiled(fastmath={"contract"})
def add_scaled(part, scale, zero, total, sums):
    for i in range(BLOCK):
        sums[i] += scale[i] * (part[i] - zero[i] * total)


def pair_of(kind):
    """The bytes of a pair of inputs in a block."""
    raise NotImplementedError("only inside compiled functions")


def ready(kind, place, steps, room):
    """A chunk of a weight as tiles take it: its tag, its address, and how far ahead of it the next is."""
    raise NotImplementedError("only inside compiled functions")


@overload(pair_of)
def _pair_of(kind):
    size = BYTES[kind]
    return lambda kind: size


@overload(ready, jit_options={"fastmath": FAST})
def _ready(kind, place, steps, room):
    if kind in PAIR:
        ahead = CHUNK * PAIR[kind]
        return lambda kind, place, steps, room: (kind, place, ahead)
    return lambda kind, place, steps, room: into_pairs(kind, place, steps, room)


@compiled()
def into_pairs(kind, place, steps, room):
    unpack(kind, place, room.ctypes.data, steps)
    return np.uint16(0), room.ctypes.data, 0


BODIES = {}
def product_body(dtype, kind):
    key = dtype, type(kind)
    if key not in BODIES: BODIES[key] = _body(dtype, kind)
    return BODIES[key]

def _body(dtype, kind):
    """The body of a thread: it takes one item after the other. `kind` is the tag of the weight."""
    like, left_like = TAGS[dtype], left_tag(dtype)

    def body(work):
        (
            _, left, down, result, rows, outputs, blocks, bias, scales, zeros, pairs, group,
        ) = to_fixed_tuple(array(work, (12,), INT64), 12)  # fmt: skip
        weight = kind, blocks, bias, scales, zeros, pairs, group
        left, result = array(left, (rows, down), left_like), array(result, (rows, outputs), like)
        sums, room = np.empty((ROWS, BLOCK), np.float32), scratch()
        columns = -(-outputs // BLOCK)
        item = take(work)
        while item < columns * -(-rows // ROWS):
            block, first = item % columns, item // columns * ROWS
            end = min(first + ROWS, rows)
            multiply_block(weight, block, left[first:end], sums[: end - first], room)
            store_block(sums, block, result[first:end])
            item = take(work)

    return on_each_thread(body)


@compiled()
def scratch():
    """The memory that `multiply_block` needs: an unpacked chunk, and the sums of a group."""
    return np.empty(CHUNK * 4 * BLOCK, np.uint8), np.empty((ROWS, BLOCK), np.float32)


@compiled()
def store_block(sums, block, result):
    """Round the sums of a block. The last block may have fewer outputs."""
    start = block * BLOCK
    if start + BLOCK <= result.shape[1]:
        for row in range(len(result)):
            own, line = sums[row], result[row, start : start + BLOCK]
            for i in range(BLOCK):
                line[i] = narrow(own[i], result[0, 0])
    else:
        for row in range(len(result)):
            for i in range(result.shape[1] - start):
                result[row, start + i] = narrow(sums[row, i], result[0, 0])


def left_tag(dtype: torch.dtype):
    """What rows of this dtype are multiplied in: bfloat16 if the processor can, else float32."""
    return TAGS[torch.bfloat16 if DOTS and dtype == torch.bfloat16 else torch.float32]


class PackedWeight:
    """A weight in blocks."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None, kind=None, scales=None, zeros=None, group=None) -> None:
        self.outputs, inputs = weight.shape
        if kind is INT4:
            inputs *= 2
        self.kind = TAGS[weight.dtype] if kind is None else kind
        self.pairs = -(-inputs // 2)
        self.group = self.pairs if group is None else group // 2
        self.blocks = in_blocks(weight, 1 if kind is INT4 else 2)
        self.bias = torch.zeros(self.blocks.shape[0] * BLOCK)
        if bias is not None:
            self.bias[: self.outputs] = bias
        self.scales = None if scales is None else in_blocks(scales.float(), 1)
        self.zeros = None if scales is None else in_blocks(torch.full_like(scales, 8.0 if kind is INT4 else 0.0) if zeros is None else zeros.float(), 1)

    def __call__(self, rows: Tensor, out=None, threads=None) -> Tensor:
        result = rows.new_empty(len(rows), self.outputs)
        left = left_of(rows)
        work = self.blocks.nbytes / 20e3 + self.outputs * self.pairs * len(rows) / 30e3
        launch(
            product_body(rows.dtype, self.kind),
            (left.data_ptr(), left.shape[1], result.data_ptr(), len(rows), self.outputs, self.blocks.data_ptr(), self.bias.data_ptr(), address(self.scales), address(self.zeros), self.pairs, self.group),
            threads or threads_for(work),
            OPENMP,
        )
        return result


def address(t):
    return NO_TENSOR if t is None else t.data_ptr()


def in_blocks(matrix: Tensor, multiple: int) -> Tensor:
    """[outputs, inputs] as [blocks, inputs, BLOCK], padded with zeros; bfloat16 in pairs."""
    outputs, inputs = matrix.shape
    if outputs % BLOCK or inputs % multiple:
        matrix = pad(matrix.view(torch.uint8) if matrix.dtype == torch.float8_e4m3fn else matrix, (0, -inputs % multiple, 0, -outputs % BLOCK))
    units = matrix.contiguous().view(torch.int32) if matrix.dtype == torch.bfloat16 else matrix
    return units.view(-1, BLOCK, units.shape[1]).transpose(1, 2).contiguous()


def left_of(rows: Tensor) -> Tensor:
    """Rows as tiles take them: [rows, inputs or more]. Rows that are 4096 bytes apart would share lines of the cache."""
    size = rows.shape[1]
    dtype = torch.bfloat16 if DOTS and rows.dtype == torch.bfloat16 else torch.float32
    if rows.dtype == dtype and size % 2 == 0 and size * dtype.itemsize % 4096:
        return rows.contiguous()
    left = torch.empty(len(rows), size + size % 2 + 16, dtype=dtype)
    left[:, :size] = rows
    left[:, size : size + size % 2] = 0
    return left

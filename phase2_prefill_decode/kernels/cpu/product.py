# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""A matrix product on a CPU, of one row or thousands, with a weight that is packed once.

A packed weight is a sequence of blocks of 64 outputs, the last padded with zeros. In a block come the numbers of the
first input for all its outputs, then those of the second, and so on: one stream of memory, in the order in which it is
read. In bfloat16 an output's numbers of two inputs lie side by side, and in 4 bits they share a byte.

A thread takes a block and up to ROWS rows, and goes through the inputs in chunks. A chunk of the weight stays in the
cache while tile after tile of rows is multiplied with it: few rows wait for memory, and many for arithmetic.

Integers and float8 are unpacked to bfloat16, chunk by chunk. A group of inputs has a scale and an offset for each
output, and a sum of its own: total += scale * (sum of number * input) - offset * (sum of input).

A row's product does not depend on the other rows, nor on how many there are: see `microkernel`.
"""

from functools import cache
from threading import Lock

import numpy as np
import torch
from numba.extending import overload
from numba.np.unsafe.ndarray import to_fixed_tuple
from torch import Tensor
from torch.nn.functional import pad

from phase1_kv_pool.memory import LINE, allocate
from phase2_prefill_decode.kernels.cpu.intrinsics import TAGS, array, compiled, kernel, narrow, widen
from phase2_prefill_decode.kernels.cpu.matmul import transpose
from phase2_prefill_decode.kernels.cpu.microkernel import (
    BF16,
    BLOCK,
    DOTS,
    F16,
    F32,
    LANES,
    PAIR,
    VECTORS,
    WIDE,
    add_tile,
    unpack,
)
from phase2_prefill_decode.kernels.cpu.openmp import OPENMP, launch, on_each_thread, spread, take, threads_for

ROWS = 96  # of an item of work: many enough to unpack a weight for, few enough for the L2 cache
CHUNK = 128 if DOTS else 64  # pairs of inputs: 512 bytes of a row
MOST, SPAN, SPAN_OF_TWO = (
    6,
    VECTORS if WIDE else 1,
    VECTORS if WIDE else 2,
)  # rows of the largest tile; vectors of tiles
FLOAT32, INT64 = np.dtype(np.float32), np.dtype(np.int64)
NO_TENSOR = 0
SPARE = 16  # numbers behind a row
TOGETHER = {torch.bfloat16: 2}  # neighbouring numbers of an output that lie side by side; else one
UNITS = {1: torch.int8, 2: torch.int16, 4: torch.int32}
FORMATS = {**TAGS, torch.int8: np.int8(0), torch.uint8: np.uint8(0), torch.float8_e4m3fn: np.uint64(0)}  # tags


class PackedWeight:
    """A weight [outputs, inputs] in blocks. It is a copy: later writes to the original have no effect. uint8 holds two
    numbers of 4 bits. Scales and offsets are [outputs, groups]; `order` is that of the inputs. With `outputs`, these
    are its first rows, and the others are added."""

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None = None,
        scales: Tensor | None = None,
        offsets: Tensor | None = None,
        order: Tensor | None = None,
        outputs: int | None = None,
    ) -> None:
        self.dtype, self.outputs = weight.dtype, outputs or len(weight)
        self.inputs = weight.shape[1] * (2 if weight.dtype == torch.uint8 else 1)
        self.order, self.pairs = order, -(-self.inputs // 2)
        self.group = self.pairs if scales is None else self.pairs // scales.shape[1]
        shapes = [(weight.shape[1] + self.inputs % 2, weight.dtype), (1, torch.float32)]
        shapes += [] if scales is None else [(scales.shape[1], torch.float32)] * 2
        self._blocks = [Blocks(self.outputs, columns, dtype) for columns, dtype in shapes]
        self._blocks[1].add(torch.zeros(self.outputs, 1) if bias is None else bias[:, None].float())
        self.add(weight, scales, offsets)

    def add(self, weight: Tensor, scales: Tensor | None = None, offsets: Tensor | None = None) -> None:
        """Add the next rows of the weight."""
        self._blocks[0].add(weight)
        if scales is not None:
            self._blocks[2].add(scales.float())
            self._blocks[3].add(torch.zeros_like(scales, dtype=torch.float32) if offsets is None else offsets.float())

    @property
    def format(self) -> str:
        return "4 bits" if self.dtype == torch.uint8 else str(self.dtype).removeprefix("torch.")

    @property
    def numbers(self) -> tuple[int, ...]:
        """What `multiply_block` takes, without the tag."""
        places = [blocks.tensor.data_ptr() for blocks in self._blocks]
        return *places, *[NO_TENSOR] * (4 - len(places)), self.pairs, self.group

    def __call__(self, rows: Tensor, result: Tensor | None = None) -> Tensor:
        if rows.shape[1] != self.inputs:
            raise ValueError(
                f"rows of {rows.shape[1]} numbers cannot be multiplied with a weight of {self.inputs} inputs"
            )
        if self.dtype.is_floating_point and self.dtype.itemsize > 1 and rows.dtype != self.dtype:
            raise ValueError(f"rows of {rows.dtype} cannot be multiplied with a weight of {self.dtype}")
        shape = len(rows), self.outputs
        result = rows.new_empty(shape) if result is None else result
        if result.shape != shape or result.dtype != rows.dtype or not result.is_contiguous():
            raise ValueError(f"the result must be contiguous, {list(shape)} in {rows.dtype}")
        left = operand(rows if self.order is None else rows[:, self.order])
        microseconds = self._blocks[0].tensor.nbytes / 20e3 + self.outputs * self.inputs * len(rows) / 60e3
        launch(
            product_body(rows.dtype, self.dtype),
            (left.data_ptr(), left.shape[1], result.data_ptr(), len(rows), self.outputs, *self.numbers),
            threads_for(microseconds),
            OPENMP,
        )
        return result

    def rows(self, tokens: Tensor, dtype: torch.dtype) -> Tensor:
        """These rows of the weight, as of an embedding: a tied lm_head is in memory once."""
        tokens, shape = tokens.long().contiguous(), (len(tokens), self.inputs)
        result, threads = torch.empty(shape, dtype=dtype), threads_for(len(tokens) * self.inputs / 200)
        sizes = tokens.data_ptr(), len(tokens), self.outputs, result.data_ptr(), self.inputs
        lookup(lookup_body(dtype, self.dtype), sizes, self.numbers, threads, OPENMP)
        if self.order is None:
            return result
        return torch.empty_like(result).index_copy_(1, self.order, result)


class Blocks:
    """A matrix [outputs, columns] as [blocks, units, BLOCK]. A unit is what an output has side by side: the number of a
    column, in bfloat16 those of two. Outputs and columns that are missing are zeros. Rows are added in their order."""

    def __init__(self, outputs: int, columns: int, dtype: torch.dtype) -> None:
        together = TOGETHER.get(dtype, 1)
        units, self._size = -(-columns // together), together * dtype.itemsize
        self.tensor = Arena.empty(torch.Size((-(-outputs // BLOCK), units, BLOCK)), UNITS[self._size])
        self.tensor[outputs // BLOCK :] = 0
        self._count = 0

    def add(self, rows: Tensor) -> None:
        units = self.tensor.shape[1]
        missing = units * self._size // rows.itemsize - rows.shape[1]
        rows = pad(rows, (0, missing)) if missing else rows.contiguous()
        arguments = rows.data_ptr(), len(rows), units, self.tensor.data_ptr(), self._count
        launch(blocks_body(self._size), arguments, threads_for(rows.nbytes / 2e3), OPENMP)
        self._count += len(rows)


@cache
def blocks_body(size: int) -> int:
    """The body of a thread that adds rows to blocks, for units of some bytes. An item has LANES rows."""
    like = {1: np.uint8(0), 2: np.uint16(0), 4: np.uint32(0)}[size]

    def body(work):
        _, source, count, units, target, first = to_fixed_tuple(array(work, (6,), INT64), 6)
        rows, places = array(source, (count, units), like), np.empty(LANES, np.int64)
        blocks = array(target, (-(-(first + count) // BLOCK), units, BLOCK), like)
        item = take(work)
        while item * LANES < count:
            start, done = item * LANES, 0
            block, lane = (first + start) // BLOCK, (first + start) % BLOCK
            if size == 4 and start + LANES <= count and lane % LANES == 0:
                for row in range(LANES):
                    places[row] = rows[start + row].ctypes.data
                done = units - units % LANES
                for unit in range(0, done, LANES):
                    result = blocks[block, unit].ctypes.data + lane * size
                    transpose(places.ctypes.data, unit * size, result, BLOCK * size, np.float32(0))
            lay_out(rows[start : start + LANES], blocks, first + start, done)
            item = take(work)

    return on_each_thread(body)


# region exercise 2.27
@compiled()
def lay_out(rows, blocks, first, done):
    """Put rows [rows, units], of the outputs from `first` on, into blocks; but for the units that are `done`."""
    for row in range(len(rows)):
        block, lane = blocks[(first + row) // BLOCK], (first + row) % BLOCK
        for unit in range(done, rows.shape[1]):
            block[unit, lane] = rows[row, unit]


# endregion


class Arena:
    """Memory for packed weights, one behind the other: the weights of a small model share huge pages."""

    SIZE = 64 << 20
    _lock, _free = Lock(), torch.empty(0, dtype=torch.uint8)

    @classmethod
    def empty(cls, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        with cls._lock:
            size = shape.numel() * dtype.itemsize
            if size > len(cls._free):
                cls._free = allocate(max(size, cls.SIZE))
            place, cls._free = cls._free[:size], cls._free[-(-size // LINE) * LINE :]
        return place.view(dtype).view(shape)


def operand(rows: Tensor) -> Tensor:
    """Rows as tiles take them, [rows, inputs or more]: with a zero behind an odd number of inputs. Rows that
    are a multiple of 4096 bytes apart would compete for the same lines of the cache."""
    dtype, inputs = operand_dtype(rows.dtype), rows.shape[1]
    if rows.dtype == dtype and inputs % 2 == 0 and (inputs * dtype.itemsize % 4096 or len(rows) == 1):
        return rows.contiguous()
    left = torch.empty(len(rows), inputs + SPARE, dtype=dtype)
    left[:, :inputs] = rows
    left[:, inputs:] = 0
    return left


def operand_dtype(dtype: torch.dtype) -> torch.dtype:
    """What rows of this dtype are multiplied in."""
    return torch.bfloat16 if DOTS and dtype == torch.bfloat16 else torch.float32


@cache
def product_body(dtype: torch.dtype, stored: torch.dtype) -> int:
    """The body of a thread, for rows of one dtype and a weight of another: it takes item after item."""
    like, kind, left_like = TAGS[dtype], FORMATS[stored], TAGS[operand_dtype(dtype)]

    def body(work):
        (
            _, left, down, result, rows, outputs, blocks, bias, scales, offsets, pairs, group,
        ) = to_fixed_tuple(array(work, (12,), INT64), 12)  # fmt: skip
        weight = kind, blocks, bias, scales, offsets, pairs, group
        left, result = array(left, (rows, down), left_like), array(result, (rows, outputs), like)
        room, columns, done = scratch(ROWS, -(-pairs // group)), -(-outputs // BLOCK), -1
        item = take(work)
        while item < columns * -(-rows // ROWS):
            block, first = item % columns, item // columns * ROWS
            end = min(first + ROWS, rows)
            if first != done:
                done = first
                add_up(weight, left[first:end], room)
            multiply_block(weight, block, left[first:end], room)
            store(room, block, result[first:end])
            item = take(work)

    return on_each_thread(body)


@compiled()
def scratch(rows, groups):
    """The memory of a thread: sums, the sums of a group, those of the inputs of each group, and an unpacked chunk."""
    return (
        np.empty((rows, BLOCK), np.float32),
        np.empty((rows, BLOCK), np.float32),
        np.empty((rows, groups), np.float32),
        np.empty(CHUNK * 4 * BLOCK, np.uint8),
    )


@compiled()
def add_up(weight, left, room):
    """Add up the inputs of each group, for the offsets."""
    _, _, _, scales, _, pairs, group = weight
    if scales != NO_TENSOR:
        for row in range(len(left)):
            for number in range(pairs // group):
                total = np.float32(0)
                for i in range(2 * number * group, 2 * (number + 1) * group):
                    total += widen(left[row, i])
                room[2][row, number] = total


# region block
@compiled()
def multiply_block(weight, block, left, room):
    """The products of all rows of `left` with a block of a weight."""
    kind, blocks, bias, scales, offsets, pairs, group = weight
    sums, part, totals, unpacked = room
    sums, size, groups = sums[: len(left)], pair_of(kind), -(-pairs // group)
    sums[:] = array(bias + block * BLOCK * 4, (BLOCK,), FLOAT32)
    for number in range(groups):
        first, end, own = number * group, min((number + 1) * group, pairs), sums
        if scales != NO_TENSOR:
            own = part[: len(left)]
            own[:] = 0
        for start in range(first, end, CHUNK):
            steps, place = min(CHUNK, end - start), left.ctypes.data + 2 * start * left.itemsize
            tag, chunk, ahead = ready(kind, blocks + (block * pairs + start) * size, steps, unpacked)
            add_rows(tag, left[0, 0], own, place, left.strides[0], chunk, steps, ahead)
        if scales != NO_TENSOR:
            line = (block * groups + number) * BLOCK * 4
            scale, offset = array(scales + line, (BLOCK,), FLOAT32), array(offsets + line, (BLOCK,), FLOAT32)
            for row in range(len(sums)):
                for i in range(BLOCK):
                    sums[row, i] += scale[i] * own[row, i] - offset[i] * totals[row, number]


@compiled()
def add_rows(kind, left_kind, sums, left, down, weight, steps, ahead):
    """sums += rows @ a chunk of a block, tile by tile: the largest first."""
    row = 0
    while row < len(sums):
        rest, at, own = len(sums) - row, sums[row:].ctypes.data, left + row * down
        if rest >= MOST:
            for v in range(0, VECTORS, SPAN):
                add_tile(MOST, SPAN, kind, left_kind, at + v * 64, own, down, vector(kind, weight, v), steps, ahead)
            row += MOST
        elif rest >= 4:
            for v in range(0, VECTORS, SPAN):
                add_tile(4, SPAN, kind, left_kind, at + v * 64, own, down, vector(kind, weight, v), steps, ahead)
            row += 4
        elif rest >= 2:
            for v in range(0, VECTORS, SPAN_OF_TWO):
                add_tile(2, SPAN_OF_TWO, kind, left_kind, at + v * 64, own, down, vector(kind, weight, v), steps, ahead)
            row += 2
        else:
            add_tile(1, VECTORS, kind, left_kind, at, own, down, weight, steps, ahead)
            row += 1


# endregion


@kernel
def lookup(body, sizes, numbers, threads, openmp):
    """Check all tokens before anything is read."""
    for token in array(sizes[0], (sizes[1],), INT64):
        if token < 0 or token >= sizes[2]:
            raise IndexError("a token is not in the vocabulary")
    spread(body, np.array((0, *sizes, *numbers)), threads, openmp)


@cache
def lookup_body(dtype: torch.dtype, stored: torch.dtype) -> int:
    """The body of a thread that looks rows up. An item is a token."""
    like, kind, size = TAGS[dtype], FORMATS[stored], CHUNK * 4 * BLOCK
    to_second, to_next = (BLOCK, 1) if stored in (torch.float32, torch.float16) else (1, 2)  # input of a pair; output

    def body(work):
        (
            _, tokens, count, _, result, inputs, blocks, _, scales, offsets, pairs, group,
        ) = to_fixed_tuple(array(work, (12,), INT64), 12)  # fmt: skip
        tokens, result = array(tokens, (count,), INT64), array(result, (count, inputs), like)
        room, groups, scale, offset = np.empty(size, np.uint8), -(-pairs // group), np.float32(1), np.float32(0)
        item = take(work)
        while item < count:
            block, lane = tokens[item] // BLOCK, tokens[item] % BLOCK
            for start in range(0, pairs, CHUNK):
                steps = min(CHUNK, pairs - start)
                tag, chunk, _ = ready(kind, blocks + (block * pairs + start) * pair_of(kind), steps, room)
                numbers = array(chunk, (steps * 2 * BLOCK,), tag)
                for i in range(2 * start, min(2 * (start + steps), inputs)):
                    place = (i // 2 - start) * 2 * BLOCK + i % 2 * to_second + lane * to_next
                    if scales != NO_TENSOR:
                        line = ((block * groups + i // 2 // group) * BLOCK + lane) * 4
                        scale, offset = array(scales + line, (1,), FLOAT32)[0], array(offsets + line, (1,), FLOAT32)[0]
                    result[item, i] = narrow(scaled(widen(numbers[place]), scale, offset), like)
            item = take(work)

    return on_each_thread(body)


@compiled(fastmath=False)
def scaled(number, scale, offset):
    """Rounded twice, as torch does it."""
    return number * scale - offset


@compiled()
def store(room, block, result):
    """Round the sums of a block. The last block may have fewer outputs."""
    start, sums = block * BLOCK, room[0]
    if start + BLOCK <= result.shape[1]:
        for row in range(len(result)):
            own, line = sums[row], result[row, start : start + BLOCK]
            for i in range(BLOCK):
                line[i] = narrow(own[i], result[0, 0])
    else:
        for row in range(len(result)):
            for i in range(result.shape[1] - start):
                result[row, start + i] = narrow(sums[row, i], result[0, 0])


def pair_of(kind):
    """The bytes of a pair of inputs in a block."""
    raise NotImplementedError("only inside compiled functions")


def vector(kind, weight, v):
    """The address of vector v of a line."""
    raise NotImplementedError("only inside compiled functions")


def ready(kind, chunk, steps, room):
    """A chunk of a block as tiles take it: a tag, an address, and how far ahead of it the next chunk is."""
    raise NotImplementedError("only inside compiled functions")


@overload(pair_of)
def _pair_of(kind):
    size = PAIR[kind]
    return lambda kind: size


@overload(vector)
def _vector(kind, weight, v):
    size = {BF16: 64, F16: 32, F32: 64}[kind]
    return lambda kind, weight, v: weight + v * size


@overload(ready)
def _ready(kind, chunk, steps, room):
    if kind in (BF16, F16, F32):
        ahead = CHUNK * PAIR[kind]
        return lambda kind, chunk, steps, room: (kind, chunk, ahead)

    def unpacked(kind, chunk, steps, room):
        unpack(kind, chunk, room.ctypes.data, steps)
        return np.uint16(0), room.ctypes.data, 0

    return unpacked

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""A matrix product on a CPU, of one row or thousands, with a weight that is packed once.

A packed weight is a sequence of blocks of 64 outputs, the last padded with zeros. In a block come the numbers of the
first input for all its outputs, then those of the second, and so on: one stream of memory, in the order in which it is
read. Of numbers with fewer than 32 bits, those of neighbouring inputs share a word.

A thread takes a block and up to ROWS rows, and goes through the inputs part by part. A part of the weight stays in the
cache while tile after tile of rows is multiplied with it: few rows wait for memory, and many for arithmetic.

A part of a quantized weight has at most PART inputs of a group, and begins with the scales of its outputs. Integers are
multiplied with integers: a row is rounded to 8 bits, each part with a scale of its own. The numbers of a weight are
around 0, and what is then to be subtracted from each, times the scale, is an offset: total -= offset * (sum of the
row's part).

A row's product does not depend on the other rows, nor on how many there are: see `microkernel`.
"""

from functools import cache
from threading import Lock
from typing import Any

import numpy as np
import torch
from numba.extending import overload
from numba.np.unsafe.ndarray import to_fixed_tuple
from torch import Tensor
from torch.nn.functional import pad

from phase1_kv_pool.memory import LINE, allocate
from phase2_prefill_decode.kernels.cpu.intrinsics import (
    NO_TENSOR,
    TAGS,
    array,
    as_bits,
    as_float,
    compiled,
    narrow,
    widen,
)
from phase2_prefill_decode.kernels.cpu.matmul import transpose
from phase2_prefill_decode.kernels.cpu.microkernel import (
    BLOCK,
    DOTS,
    HEAD,
    INPUTS,
    LANES,
    LOOKUP,
    MIDDLE,
    QUADS,
    SCALED,
    VECTORS,
    WIDE,
    add_tile,
    line_bytes,
)
from phase2_prefill_decode.kernels.cpu.openmp import OPENMP, launch, on_each_thread, take, threads_for
from phase2_prefill_decode.loading.quantized.weight import MIDDLE as MIDDLE_OF_4_BITS
from phase2_prefill_decode.loading.quantized.weight import unpacked

ROWS = 96  # of an item of work: many enough to read a part for, few enough for the cache
CHUNK = 256 if DOTS else 128  # inputs of a part, without scales: 512 bytes of a row
PART = 128  # inputs that share a scale of a row, at most
UNIT = 8  # inputs: parts with scales are multiples
MOST = 6  # rows of a tile
SPAN, SPAN_OF_TWO = (VECTORS, VECTORS) if WIDE else (1, 2)  # vectors of tiles, and of those of two rows
FLOAT32, INT32, INT64, UINT8, UINT64 = map(np.dtype, (np.float32, np.int32, np.int64, np.uint8, np.uint64))
TOGETHER = {torch.bfloat16: 2}  # neighbouring numbers of an output that lie side by side; else one
UNITS = {2: torch.int16, 4: torch.int32}
NUMBERS = 7  # of a weight, as kernels take it
FORMATS = {**TAGS, torch.int8: np.int8(0), torch.uint8: np.uint8(0), torch.float8_e4m3fn: np.uint64(0)}  # tags
TINY = np.float32(2.0**-100)  # a part of a row without larger numbers is rounded to multiples of this / 127
INFINITE = np.uint32(0x7F800000)  # the bits of an infinity; those of a NaN are larger
ROUND = np.float32(1.5 * 2**23)  # a float32 plus this is rounded to a whole number


class PackedWeight:
    """A weight [outputs, inputs] in blocks. It is a copy: later writes to the original have no effect. uint8 holds two
    numbers of 4 bits, each with 8 added. Scales and offsets are [outputs, groups]; `order` is that of the inputs. With
    `outputs`, these are its first rows, and the others are added."""

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None = None,
        scales: Tensor | None = None,
        offsets: Tensor | None = None,
        order: Tensor | None = None,
        outputs: int | None = None,
    ) -> None:
        self.dtype, self.outputs, self.order = weight.dtype, outputs or len(weight), order
        per_byte = 2 if weight.dtype == torch.uint8 else 1
        self.inputs = self.group = weight.shape[1] * per_byte
        self.part, self.span = CHUNK, self.inputs + self.inputs % 2  # the inputs of a group, with padding
        columns, dtype, heads = self.span, weight.dtype, 0
        if scales is not None:
            self.group = self.inputs // scales.shape[1]
            parts = -(-self.group // PART)
            self.part = -(-self.group // (UNIT * parts)) * UNIT
            self.span, heads = parts * self.part, parts * scales.shape[1]
            columns, dtype = heads * (1 + self.part // (4 * per_byte)), torch.int32
        shapes = [(columns, dtype), (1, torch.float32)] + ([] if offsets is None else [(heads, torch.float32)])
        self._blocks = [Blocks(self.outputs, columns, dtype) for columns, dtype in shapes]
        self._blocks[1].add(torch.zeros(self.outputs, 1) if bias is None else bias[:, None].float())
        self.add(weight, scales, offsets)

    def add(self, weight: Tensor, scales: Tensor | None = None, offsets: Tensor | None = None) -> None:
        """Add the next rows of the weight."""
        self._blocks[0].add(weight if scales is None else self._words(weight, scales))
        if offsets is not None:
            self._blocks[2].add(offsets.float().repeat_interleave(self.span // self.part, 1))

    def _words(self, weight: Tensor, scales: Tensor) -> Tensor:
        """Rows of a quantized weight as words: of each part the scale, then the numbers."""
        scales = scales.float().repeat_interleave(self.span // self.part, 1)
        numbers = unpacked(weight) if weight.dtype == torch.uint8 else weight.view(torch.int8)
        numbers = pad(numbers.unflatten(1, (-1, self.group)), (0, self.span - self.group)).reshape(*scales.shape, -1)
        if weight.dtype.is_floating_point:  # in the product, the bits of a NaN are those of a number
            scales = torch.where((numbers & 127 == 127).any(2), torch.nan, scales)
        elif weight.dtype == torch.uint8:
            numbers = numbers.unflatten(2, (-1, 2, 4))
            numbers = (numbers[..., 0, :] | numbers[..., 1, :] << 4).flatten(2)
        else:
            numbers = numbers ^ -128
        return torch.cat((scales[..., None].view(torch.int32), numbers.view(torch.int32)), 2).flatten(1)

    @property
    def format(self) -> str:
        return "4 bits" if self.dtype == torch.uint8 else str(self.dtype).removeprefix("torch.")

    @property
    def numbers(self) -> tuple[int, ...]:
        """What `multiply_block` takes, without the tag."""
        places = [blocks.tensor.data_ptr() for blocks in self._blocks]
        return *places, *[NO_TENSOR] * (3 - len(places)), self.inputs, self.group, self.span, self.part

    def __call__(self, rows: Tensor, result: Tensor | None = None) -> Tensor:
        if rows.shape[1] != self.inputs:
            raise ValueError(
                f"rows of {rows.shape[1]} numbers cannot be multiplied with a weight of {self.inputs} inputs"
            )
        if self.dtype in TAGS and rows.dtype != self.dtype:
            raise ValueError(f"rows of {rows.dtype} cannot be multiplied with a weight of {self.dtype}")
        shape = len(rows), self.outputs
        result = rows.new_empty(shape) if result is None else result
        if result.shape != shape or result.dtype != rows.dtype or not result.is_contiguous():
            raise ValueError(f"the result must be contiguous, {list(shape)} in {rows.dtype}")
        rows = rows.contiguous() if self.order is None else rows[:, self.order]
        left = torch.empty(len(rows), self.stride(rows.dtype), dtype=torch.uint8)
        lay, multiply = bodies(rows.dtype, self.dtype)
        numbers = left.data_ptr(), left.shape[1], len(rows), *self.numbers
        launch(lay, (rows.data_ptr(), *numbers), threads_for(rows.numel() / 1e3), OPENMP)
        microseconds = self._blocks[0].tensor.nbytes / 20e3 + self.outputs * self.inputs * len(rows) / 60e3
        launch(multiply, (result.data_ptr(), self.outputs, *numbers), threads_for(microseconds), OPENMP)
        return result

    def stride(self, dtype: torch.dtype) -> int:
        """The bytes from one row of a dtype to the next, as tiles take them. Those that are a multiple of 4096 bytes
        apart would compete for the same lines of the cache."""
        inputs = self.inputs // self.group * self.span
        heads = 0 if self.dtype in TAGS else inputs // self.part * HEAD
        size = inputs * left_tag(dtype, self.dtype).itemsize + heads
        return int(size + (0 if size % 4096 else LINE))

    def rows(self, tokens: Tensor, dtype: torch.dtype) -> Tensor:
        """These rows of the weight, as of an embedding: a tied lm_head is in memory once."""
        if len(tokens) and not 0 <= int(tokens.min()) <= int(tokens.max()) < self.outputs:
            raise IndexError("a token is not in the vocabulary")
        units, *others = (blocks.rows(tokens) for blocks in self._blocks)
        if self.dtype in TAGS:
            return units.view(self.dtype)[:, : self.inputs].to(dtype)
        parts = units.view(len(tokens), self.inputs // self.group * self.span // self.part, -1)
        numbers, scales = parts[..., 1:].contiguous(), parts[..., :1].contiguous().view(torch.float32)
        if self.dtype == torch.uint8:
            pairs = numbers.view(torch.uint8).unflatten(2, (-1, 1, 4))
            values = torch.cat((pairs & 15, pairs >> 4), 3).flatten(2).float() - MIDDLE_OF_4_BITS
        else:
            values = (numbers.view(torch.int8) ^ -128 if self.dtype == torch.int8 else numbers.view(self.dtype)).float()
        values *= scales
        if len(others) == 2:
            values -= others[1].view(torch.float32)[..., None]
        result = values.view(len(tokens), -1, self.span)[..., : self.group].flatten(1).to(dtype)
        return result if self.order is None else torch.empty_like(result).index_copy_(1, self.order, result)


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

    def rows(self, outputs: Tensor) -> Tensor:
        """The units of these outputs."""
        return self.tensor[outputs // BLOCK, :, outputs % BLOCK]


@cache
def blocks_body(size: int) -> int:
    """The body of a thread that adds rows to blocks, for units of some bytes. An item has LANES rows."""
    like = {2: np.uint16(0), 4: np.uint32(0)}[size]

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
            put(rows[start : start + LANES], blocks, first + start, done)
            item = take(work)

    return on_each_thread(body)


# region exercise 2.27
@compiled()
def put(rows, blocks, first, done):
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


def left_tag(dtype: torch.dtype, stored: torch.dtype) -> Any:
    """The tag of what rows of a dtype are multiplied in, with a weight of another."""
    if stored in (torch.int8, torch.uint8):
        return np.int8(0) if QUADS else np.int16(0)
    pairs = DOTS if stored == torch.bfloat16 else LOOKUP
    return TAGS[dtype] if pairs and dtype == torch.bfloat16 else np.float32(0)


@cache
def bodies(dtype: torch.dtype, stored: torch.dtype) -> tuple[int, int]:
    """The bodies of a thread, for rows of one dtype and a weight of another: one lays rows out for tiles, and one
    multiplies them. Each takes item after item."""
    like, kind, left_like = TAGS[dtype], FORMATS[stored], left_tag(dtype, stored)

    def lay(work):
        _, x, left, stride, rows = to_fixed_tuple(array(work, (5,), INT64), 5)
        weight = weight_at(kind, work + 40)
        row, x, left = take(work), array(x, (rows, weight[4]), like), array(left, (rows, stride), UINT8)
        while row < rows:
            lay_out(x[row], weight, left_like, left[row])
            row = take(work)

    def multiply(work):
        _, result, outputs, left, stride, rows = to_fixed_tuple(array(work, (6,), INT64), 6)
        weight, result = weight_at(kind, work + 48), array(result, (rows, outputs), like)
        left = array(left, (rows, stride), UINT8)
        sums, columns = np.empty((ROWS, BLOCK), np.float32), -(-outputs // BLOCK)
        item = take(work)
        while item < columns * -(-rows // ROWS):
            block, first = item % columns, item // columns * ROWS
            some = sums[: min(rows - first, ROWS)]
            multiply_block(weight, block, (left_like, left[first:]), some)
            store(some, block, result[first : first + ROWS])
            item = take(work)

    return on_each_thread(lay), on_each_thread(multiply)


@compiled()
def weight_at(kind, address):
    """A weight, of its numbers at an address, as `multiply_block` takes it."""
    blocks, bias, offsets, inputs, group, span, part = to_fixed_tuple(array(address, (NUMBERS,), INT64), NUMBERS)
    return kind, blocks, bias, offsets, inputs, group, span, part


def sizes(kind, left_like):
    """The inputs of a line; the bytes of a line, of the scales before the lines of a part, of what is before a row's
    numbers of a part, and of such a number."""
    raise NotImplementedError("only inside compiled functions")


@overload(sizes)
def _sizes(kind, left_like):
    scaled = kind in SCALED
    found = INPUTS[kind], line_bytes(kind), 4 * BLOCK if scaled else 0, HEAD if scaled else 0, left_like.bitwidth // 8
    return lambda kind, left_like: found


@compiled()
def lay_out(x, weight, left_like, left):
    """Write a row as tiles take it: part by part, with zeros for the inputs that a weight's layout adds."""
    kind, _, _, _, inputs, group, span, part = weight
    place, (_, _, _, head, size) = left.ctypes.data, sizes(kind, left_like)
    for first in range(0, inputs, group):
        for start in range(0, span, part):
            count = min(part, span - start)
            write_part(x[first + start : first + min(start + count, group)], kind, left_like, place, count)
            place += head + count * size


# region quantize
@compiled(fastmath=False)
def quantize(x, place, numbers):
    """A part of a row in 8 bits: write its scale, the sum of its integers, and these. The largest in magnitude becomes
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
    array(place, (1,), FLOAT32)[0] = scale
    array(place + 4, (1,), INT32)[0] = total


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
    """Write a part of a row with what is before its numbers."""
    raise NotImplementedError("only inside compiled functions")


@overload(write_part)
def _write_part(x, kind, left_like, place, count):
    integers, scaled = kind in MIDDLE, kind in SCALED
    swapped, head = scaled and left_like.bitwidth == 16, HEAD if scaled else 0

    def write(x, kind, left_like, place, count):
        numbers = array(place + head, (count,), left_like)
        numbers[len(x) :] = 0
        if integers:
            quantize(x, place, numbers)
        else:
            convert(x, numbers)
            if scaled:
                array(place, (1,), FLOAT32)[0] = 1
        if swapped:
            swap(place + head, count)

    return write


# region block
@compiled()
def multiply_block(weight, block, left, sums):
    """The products of rows, as `lay_out` writes them, with a block of a weight."""
    kind, blocks, bias, offsets, inputs, group, span, part = weight
    left_like, rows = left
    place, stride = rows.ctypes.data, rows.shape[1]
    per_line, line, scales, head, size = sizes(kind, left_like)
    inputs = inputs // group * span
    source = blocks + block * (inputs // per_line * line + inputs // part * scales)
    offset = offsets + block * (inputs // part) * BLOCK * 4 if offsets != NO_TENSOR else NO_TENSOR
    sums[:] = array(bias + block * BLOCK * 4, (BLOCK,), FLOAT32)
    for start in range(0, inputs, part):
        count = min(part, inputs - start)
        if offset != NO_TENSOR:
            subtract(sums, array(offset, (BLOCK,), FLOAT32), place, stride)
            offset += BLOCK * 4
        add_rows(kind, left_like, sums, place, stride, source, count // per_line, part // per_line * line)
        source += scales + count // per_line * line
        place += head + count * size


@compiled()
def subtract(sums, offsets, left, down):
    """Subtract what the offsets of a part make of each row: its sum times its scale."""
    for row in range(len(sums)):
        total = np.float32(array(left + row * down + 4, (1,), INT32)[0]) * array(left + row * down, (1,), FLOAT32)[0]
        for i in range(BLOCK):
            sums[row, i] -= offsets[i] * total


@compiled()
def add_rows(kind, left_like, sums, left, down, weight, steps, ahead):
    """Add the products of a part, tile by tile: the largest first."""
    row = 0
    while row < len(sums):
        rest, at, own = len(sums) - row, sums[row:].ctypes.data, left + row * down
        if rest >= MOST:
            for v in range(0, VECTORS, SPAN):
                add_tile(MOST, SPAN, kind, left_like, v, at, own, down, weight, steps, ahead)
            row += MOST
        elif rest >= 4:
            for v in range(0, VECTORS, SPAN):
                add_tile(4, SPAN, kind, left_like, v, at, own, down, weight, steps, ahead)
            row += 4
        elif rest >= 2:
            for v in range(0, VECTORS, SPAN_OF_TWO):
                add_tile(2, SPAN_OF_TWO, kind, left_like, v, at, own, down, weight, steps, ahead)
            row += 2
        else:
            add_tile(1, VECTORS, kind, left_like, 0, at, own, down, weight, steps, ahead)
            row += 1


# endregion


@compiled()
def store(sums, block, result):
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

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""A matrix product on a CPU, of one row or thousands, with a weight that is packed once.

A packed weight is a sequence of blocks of 64 outputs, the last padded with zeros. In a block come the numbers of the
first input for all its outputs, then those of the second, and so on: one stream of memory, in the order in which it is
read. Of numbers with fewer than 32 bits, those of neighbouring inputs share a word.

A thread takes a block and up to ITEM_ROWS rows, and goes through the inputs part by part. A part of the weight stays in
the cache while tile after tile of rows is multiplied with it: few rows wait for memory, and many for arithmetic.

A part of a quantized weight has at most PART inputs of a group. The scales of its outputs are before it; scales of 16
bits are before two parts, which share their words. Integers are multiplied with integers: a row is rounded to 8 bits,
each part with a scale of its own. The numbers of a weight are
around 0, and what is then to be subtracted from each, times the scale, is an offset: total -= offset * (sum of the
row's part). Offsets are a product of their own, in float32, with these sums: it comes last.

A row's product does not depend on the other rows, nor on how many there are: see `microkernel`.
"""

from functools import cache

import numpy as np
import torch
from numba.np.unsafe.ndarray import to_fixed_tuple
from torch import Tensor
from torch.nn.functional import pad

from phase1_kv_pool.memory import LINE
from phase2_prefill_decode.extras.cpu.blocks import Blocks
from phase2_prefill_decode.extras.cpu.intrinsics import (
    NO_TENSOR,
    TAGS,
    array,
    as_float,
    compiled,
    float_from_half,
    kernel,
    narrow,
)
from phase2_prefill_decode.extras.cpu.microkernel import (
    BLOCK,
    DOTS,
    HEAD,
    PAIRS,
    SET,
    VECTORS,
    WIDE,
    add_tile,
    repeat_line,
    widen_scales,
)
from phase2_prefill_decode.extras.cpu.openmp import OPENMP, address_of, call, launch, take, threads_for
from phase2_prefill_decode.extras.cpu.rows import INT6, lay_out, left_tag, sizes
from phase2_prefill_decode.extras.quantized.weight import MIDDLE, unpacked

ITEM_ROWS = 96  # many enough to read a part for, few enough for the cache
CHUNK = 256 if DOTS else 128  # inputs of a part, without scales: 512 bytes of a row
PART = 128  # inputs that share a scale of a row, at most
UNIT = 8  # inputs: parts with scales are multiples
MOST = 6  # rows of a tile
SPAN, SPAN_OF_TWO = (VECTORS, VECTORS) if WIDE else (1, 2)  # vectors of tiles, and of those of two rows
FLOAT32, INT64, UINT8, UINT32 = map(np.dtype, (np.float32, np.int64, np.uint8, np.uint32))
AT_ONCE = 256  # rows of a quantized weight that are packed together: what this takes besides stays small
WEIGHT_NUMBERS = 11  # that describe a weight to a kernel
SCALES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
FORMATS = {
    **TAGS, torch.int8: np.int8(0), INT6: np.int64(0), torch.uint8: np.uint8(0), torch.float8_e4m3fn: np.uint64(0)
}  # tags  # fmt: skip


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
        self.dtype = INT6 if weight.dtype == torch.int8 and PAIRS else weight.dtype  # unless larger numbers are added
        self.outputs, self.order = outputs or len(weight), order
        per_byte = 2 if weight.dtype == torch.uint8 else 1
        self.inputs = self.group = weight.shape[1] * per_byte
        self.part, self.span = CHUNK, self.inputs + self.inputs % 2  # the inputs of a group, with padding
        self._scale_dtype = torch.float32
        columns, dtype, heads = self.span, weight.dtype, 0
        if scales is not None:
            self.group = self.inputs // scales.shape[1]
            parts = -(-self.group // PART)
            self.part = -(-self.group // (UNIT * parts)) * UNIT
            self.span, heads = parts * self.part, parts * scales.shape[1]
            self._scale_dtype = scales.dtype
            columns, dtype = -(-heads // self._together) + heads * self.part // (4 * per_byte), torch.int32
        shapes = [(columns, dtype), (1, torch.float32)] + ([] if offsets is None else [(heads, torch.float32)])
        self._blocks = [Blocks(self.outputs, columns, dtype) for columns, dtype in shapes]
        self._blocks[1].add(torch.zeros(self.outputs, 1) if bias is None else bias[:, None].float())
        self.add(weight, scales, offsets)

    def add(self, weight: Tensor, scales: Tensor | None = None, offsets: Tensor | None = None) -> None:
        """Add the next rows of the weight."""
        if scales is None:
            self._blocks[0].add(weight)
        else:
            for some, own in zip(weight.split(AT_ONCE), scales.split(AT_ONCE), strict=True):
                self._blocks[0].add(self._words(some, own))
        if offsets is not None:
            self._blocks[2].add(offsets.float().repeat_interleave(self.span // self.part, 1))

    @property
    def _together(self) -> int:
        """The parts whose scales share a word."""
        return 4 // self._scale_dtype.itemsize

    def _words(self, weight: Tensor, scales: Tensor) -> Tensor:
        """Rows of a quantized weight as words: of each part, or of each two, the scales, then the numbers."""
        scales = scales.to(self._scale_dtype).repeat_interleave(self.span // self.part, 1)
        numbers = unpacked(weight) if weight.dtype == torch.uint8 else weight.view(torch.int8)
        numbers = pad(numbers.unflatten(1, (-1, self.group)), (0, self.span - self.group)).reshape(*scales.shape, -1)
        if weight.dtype.is_floating_point:  # in the product, the bits of a NaN are those of a number
            scales = torch.where((numbers & 127 == 127).any(2), torch.nan, scales)
        elif weight.dtype == torch.uint8:
            numbers = numbers.unflatten(2, (-1, 2, 4))
            numbers = (numbers[..., 0, :] | numbers[..., 1, :] << 4).flatten(2)
        else:
            if self.dtype == INT6 and not bool(((numbers + 32) & -64 == 0).all()):
                self.dtype = torch.int8
            numbers = numbers ^ -128
        missing = scales.shape[1] % self._together
        scales, words = pad(scales, (0, missing)), pad(numbers.view(torch.int32), (0, 0, 0, missing))
        units = torch.cat((scales.view(torch.int32)[..., None], words.unflatten(1, (-1, self._together)).flatten(2)), 2)
        return units.flatten(1)[:, : self._blocks[0].tensor.shape[1]]

    @property
    def kernel(self) -> str:
        numbers = "4 bits" if self.dtype == torch.uint8 else str(self.dtype).removeprefix("torch.")
        return f"{numbers}, packed for {SET}"

    def numbers(self, dtype: torch.dtype) -> tuple[int, ...]:
        """The weight as kernels take it, for rows of a dtype: its own functions, the number of its outputs, and what
        these functions take."""
        places = [blocks.tensor.data_ptr() for blocks in self._blocks]
        places += [NO_TENSOR] * (3 - len(places))
        sizes = self.outputs, self.inputs, *places, self.group, self.span, self.part, SCALES[self._scale_dtype]
        return *functions(dtype, self.dtype), *sizes

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
        lay, multiply = bodies(rows.dtype)
        numbers = left.data_ptr(), left.shape[1], len(rows), *self.numbers(rows.dtype)
        launch(lay, (rows.data_ptr(), *numbers), threads_for(rows.numel() / 1e3), OPENMP)
        microseconds = self._blocks[0].tensor.nbytes / 20e3 + self.outputs * self.inputs * len(rows) / 60e3
        launch(multiply, (result.data_ptr(), *numbers), threads_for(microseconds), OPENMP)
        return result

    def stride(self, dtype: torch.dtype) -> int:
        """The bytes from one row of a dtype to the next, as tiles take them. Those that are a multiple of 4096 bytes
        apart would compete for the same lines of the cache."""
        inputs = self.inputs // self.group * self.span
        heads = 0 if self.dtype in TAGS else inputs // self.part * (HEAD + 4 * (len(self._blocks) > 2))
        size = inputs * left_tag(dtype, self.dtype).itemsize + heads
        return int(size + (0 if size % 4096 else LINE))

    def rows(self, tokens: Tensor, dtype: torch.dtype) -> Tensor:
        """These rows of the weight, as of an embedding: a tied lm_head is in memory once."""
        if len(tokens) and not 0 <= int(tokens.min()) <= int(tokens.max()) < self.outputs:
            raise IndexError("a token is not in the vocabulary")
        units = self._blocks[0].rows(tokens).contiguous()
        if self.dtype in TAGS:
            return units.view(self.dtype)[:, : self.inputs].to(dtype)
        heads, table = self.inputs // self.group * self.span // self.part, number_table(self.dtype)
        values = torch.empty(len(tokens), heads, self.part)
        sizes = *units.shape, heads, self.part, self._together, SCALES[self._scale_dtype], len(table)
        scaled_rows(units.data_ptr(), values.data_ptr(), table.data_ptr(), sizes)
        if len(self._blocks) > 2:
            values -= self._blocks[2].rows(tokens).view(torch.float32)[..., None]
        result = values.view(len(tokens), -1, self.span)[..., : self.group].flatten(1).to(dtype)
        return result if self.order is None else torch.empty_like(result).index_copy_(1, self.order, result)


@cache
def number_table(stored: torch.dtype) -> Tensor:
    """The numbers that the bits of a packed weight stand for."""
    if stored == torch.float8_e4m3fn:
        return torch.arange(256, dtype=torch.uint8).view(stored).float()
    return torch.arange(-MIDDLE, MIDDLE).float() if stored == torch.uint8 else torch.arange(-128, 128).float()


@kernel
def scaled_rows(units, values, table, sizes):
    """Of rows of a quantized weight, the numbers of each part times its scale."""
    count, width, heads, part, together, narrowed, different = sizes
    units, values = array(units, (count, width), UINT32), array(values, (count, heads, part), FLOAT32)
    table, per_unit = array(table, (different,), FLOAT32), 8 if different == 16 else 4
    words = part // per_unit
    for row in range(count):
        for head in range(heads):
            first, index = head // together * (1 + together * words), head % together
            word, start = units[row, first] >> np.uint32(16 * index), first + 1 + index * words
            scale = float_from_half(np.int16(word)) if narrowed == 1 else as_float(word << np.uint32(8 * narrowed))
            for i in range(part):
                shift = i % 4 * 8 + i % per_unit // 4 * 4  # of the last four of eight, 4 more
                values[row, head, i] = (
                    table[units[row, start + i // per_unit] >> np.uint32(shift) & (different - 1)] * scale
                )


@cache
def functions(dtype: torch.dtype, stored: torch.dtype) -> tuple[int, int]:
    """The addresses of the functions of a format, for rows of a dtype: one lays a row out for tiles, and one multiplies
    rows with a block. A kernel calls those of each weight, whatever its format."""
    like, kind, left_like = TAGS[dtype], FORMATS[stored], left_tag(dtype, stored)

    def lay(weight, x, left):
        weight = weight_at(kind, weight)
        lay_out(array(x, (weight[1],), like), weight, left_like, left)

    def multiply(weight, block, left, stride, rows, sums):
        left = left_like, left, stride
        multiply_block(weight_at(kind, weight), block, left, array(sums, (rows, BLOCK), FLOAT32))

    return address_of(lay, 3), address_of(multiply, 6)


@cache
def bodies(dtype: torch.dtype) -> tuple[int, int]:
    """The bodies of a thread, for rows of a dtype: one lays them out, and one multiplies them. Each takes item after
    item."""
    like = TAGS[dtype]

    def lay(work):
        _, x, left, stride, rows = to_fixed_tuple(array(work, (5,), INT64), 5)
        weight = work + 40
        x, left = array(x, (rows, described(weight)[3]), like), array(left, (rows, stride), UINT8)
        row = take(work)
        while row < rows:
            lay_row(weight, x[row], left[row])
            row = take(work)

    def multiply(work):
        _, result, left, stride, rows = to_fixed_tuple(array(work, (5,), INT64), 5)
        weight = work + 40
        outputs = described(weight)[2]
        result, left = array(result, (rows, outputs), like), array(left, (rows, stride), UINT8)
        sums, columns = np.empty((ITEM_ROWS, BLOCK), np.float32), -(-outputs // BLOCK)
        item = take(work)
        while item < columns * -(-rows // ITEM_ROWS):
            block, first = item % columns, item // columns * ITEM_ROWS
            write_block(weight, block, left[first:], sums, result[first : first + ITEM_ROWS], block * BLOCK)
            item = take(work)

    return address_of(lay), address_of(multiply)


@compiled()
def described(weight):
    """Of the weight at an address: its functions, and the numbers of its outputs and inputs."""
    return to_fixed_tuple(array(weight, (4,), INT64), 4)


@compiled()
def lay_row(weight, x, left):
    """Write a row as the tiles of a weight take it."""
    call(described(weight)[0], (weight, x.ctypes.data, left.ctypes.data))


@compiled()
def write_block(weight, block, left, sums, result, start):
    """The products of rows with a block of a weight, rounded, as columns of `result` from `start` on. The last block
    may have fewer outputs."""
    _, multiply, outputs, _ = described(weight)
    call(multiply, (weight, block, left.ctypes.data, left.shape[1], len(result), sums.ctypes.data))
    stop = start + min(BLOCK, outputs - block * BLOCK)
    for row in range(len(result)):
        own, line = sums[row], result[row, start:stop]
        for i in range(len(line)):
            line[i] = narrow(own[i], result[0, 0])


@compiled()
def weight_at(kind, address):
    """A weight as the functions of its format take it."""
    inputs, blocks, bias, offsets, group, span, part, narrow = to_fixed_tuple(array(address + 24, (8,), INT64), 8)
    return kind, inputs, blocks, bias, offsets, group, span, part, narrow


# region block
@compiled()
def multiply_block(weight, block, left, sums):
    """The products of rows, as `lay_out` writes them, with a block of a weight."""
    kind, inputs, blocks, bias, offsets, group, span, part, narrow = weight
    left_like, place, stride = left
    per_line, line, scale_line, head, size = sizes(kind, left_like)
    inputs = inputs // group * span
    parts, together = -(-inputs // part), 2 if narrow else 1  # parts whose scales share a word
    source = blocks + block * (inputs // per_line * line + -(-parts // together) * scale_line)
    repeat_line(bias + block * BLOCK * 4, sums.ctypes.data, len(sums))
    shared = source
    for index in range(parts):
        if index % together == 0:
            shared, source = source, source + scale_line
        scales = widen_scales(shared, index % 2, narrow - 1) if narrow else shared
        count = min(part, inputs - index * part)
        add_rows(kind, left_like, sums, place, stride, source, scales, count // per_line, part // per_line * line)
        source += count // per_line * line
        place += head + count * size
    if offsets != NO_TENSOR:
        number, size = np.float32(0), parts * BLOCK * 4
        add_rows(number, number, sums, place, stride, offsets + block * size, 0, parts, size)


@compiled()
def add_rows(kind, left_like, sums, left, down, weight, scales, steps, ahead):
    """Add the products of a part, tile by tile: the largest first."""
    row = 0
    while row < len(sums):
        rest, at, own = len(sums) - row, sums[row:].ctypes.data, left + row * down
        if rest >= MOST:
            for v in range(0, VECTORS, SPAN):
                add_tile(MOST, SPAN, kind, left_like, v, at, own, down, weight, scales, steps, ahead)
            row += MOST
        elif rest >= 4:
            for v in range(0, VECTORS, SPAN):
                add_tile(4, SPAN, kind, left_like, v, at, own, down, weight, scales, steps, ahead)
            row += 4
        elif rest >= 2:
            for v in range(0, VECTORS, SPAN_OF_TWO):
                add_tile(2, SPAN_OF_TWO, kind, left_like, v, at, own, down, weight, scales, steps, ahead)
            row += 2
        else:
            add_tile(1, VECTORS, kind, left_like, 0, at, own, down, weight, scales, steps, ahead)
            row += 1


# endregion

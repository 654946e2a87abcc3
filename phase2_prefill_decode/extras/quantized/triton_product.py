# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""Products of rows and a quantized weight: few rows read it as stored, many rows read it widened.

With few rows a product waits for the weight. A program computes a tile of outputs for a tile of rows: the weight is the
left side of its product, which a tensor core takes from registers, where it was widened, and the rows from shared
memory. The inputs are cut into splits. Each has a program of its own, so that enough of them read memory at once, and a
second kernel adds their sums in order. The splits depend on the shape of the weight alone, so the result of a row does
not depend on how many others there are.

With many rows a product waits for arithmetic, and each program would widen the same weight again for its own tile of
rows. So a block of the weight is widened in memory, and torch multiplies by it.
"""

from dataclasses import replace
from functools import cache
from math import gcd
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from phase1_kv_pool.kernels.triton.launch import jit
from phase2_prefill_decode.decoder import Decoder
from phase2_prefill_decode.extras.linears import Compiled, Joined, every_product
from phase2_prefill_decode.extras.quantized.weight import QuantizedWeight
from phase2_prefill_decode.extras.streams import Matrix
from phase2_prefill_decode.kernels.triton.tiles import PRECISION
from phase2_prefill_decode.linear import Linear, TorchLinear

PROGRAMS = 512  # for few rows, about: several for each multiprocessor of today's GPUs
SHORTEST = 512  # inputs of a split, at least
LONGEST_TILE = 128  # inputs of a tile; splits are multiples of it
MANY = 256  # rows, above which the weight is widened in memory
WIDENED = 8192  # outputs of a weight that are in memory, widened, at once
JOINED = 1024  # numbers of a row that a program of join_splits_kernel adds
LARGEST = tl.constexpr(448.0)  # number of a float8
FEW = 16  # rows, at most, that stay in 16 bits beside a float8 weight: the product waits for memory


# region product
@jit(do_not_specialize=["rows"])
def product_kernel(
    x,  # [rows, inputs]
    values,  # [outputs, inputs] uint8: an int8 or a float8; or two numbers of 4 bits, the low ones first
    scales,  # [outputs, inputs / group]
    zeros,  # the same, or None
    offsets,  # the same, or None
    bias,  # [outputs], or None
    result,  # [rows, outputs]; of splits [splits, rows, outputs] float32
    rows,
    outputs,
    inputs: tl.constexpr,
    group: tl.constexpr,
    kind: tl.constexpr,  # what the numbers are: int4, int8 or fp8
    split: tl.constexpr,  # inputs of a split
    tile_rows: tl.constexpr,
    tile_out: tl.constexpr,
    tile_in: tl.constexpr,
):
    """Each program computes the sums of one split for a tile of the result."""
    m, n = tl.swizzle2d(tl.program_id(0), tl.program_id(1), tl.num_programs(0), tl.num_programs(1), 8)
    row, out = m * tile_rows + tl.arange(0, tile_rows), n * tile_out + tl.arange(0, tile_out)
    row, out = row.to(tl.int64)[None, :], out.to(tl.int64)[:, None]
    is_row, is_out = row < rows, out < outputs
    whole: tl.constexpr = group == inputs and offsets is None  # a sum is scaled, not each number
    total = tl.zeros([tile_out, tile_rows], tl.float32)
    start = tl.program_id(2) * split
    for first in range(start, tl.minimum(start + split, inputs), tile_in):
        weight = load_weight(values, scales, zeros, offsets, out, is_out, first, inputs, group, kind, not whole,
                             tile_in, x.dtype.element_ty)  # fmt: skip
        i = first + tl.arange(0, tile_in)[:, None]
        part = tl.load(x + row * inputs + i, mask=is_row & (i < inputs), other=0.0)
        total = tl.dot(weight, part, total, input_precision=PRECISION)
    if whole:
        total *= tl.load(scales + out, mask=is_out, other=0.0).to(tl.float32)
    if bias is not None:
        total += tl.load(bias + out, mask=is_out, other=0.0).to(tl.float32)
    result += tl.program_id(2).to(tl.int64) * rows * outputs
    tl.store(result + row * outputs + out, total.to(result.dtype.element_ty), mask=is_row & is_out)


# endregion


@triton.jit
def load_weight(
    values, scales, zeros, offsets, out, is_out, first, inputs: tl.constexpr, group: tl.constexpr, kind: tl.constexpr,
    scaled: tl.constexpr, tile_in: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """A tile of the weight in the dtype of the rows. A result computed in 16 bits is rounded once."""
    in_byte: tl.constexpr = 2 if kind == "int4" else 1  # numbers
    span: tl.constexpr = min(group & -group, tile_in) if group < inputs else tile_in  # inputs that share a scale
    groups: tl.constexpr = tile_in // span
    byte = first // in_byte + tl.arange(0, tile_in // in_byte)[None, :]
    is_byte = is_out & (byte < inputs // in_byte)
    bits = tl.load(values + out * (inputs // in_byte) + byte, mask=is_byte, other=0)
    at = tl.arange(0, groups)[None, :]
    if group < inputs:
        at = (first // span + at) // (group // span)
    place, is_group = out * (inputs // group) + at, is_out & (at < inputs // group)
    short: tl.constexpr = tl.bfloat16 if dtype == tl.bfloat16 else tl.float16
    in_short: tl.constexpr = offsets is None and scales.dtype.element_ty == short and dtype == short
    arithmetic: tl.constexpr = short if in_short or not scaled else tl.float32
    number = exact(bits, kind, zeros is None and offsets is None, short).to(arithmetic)
    number = number.reshape(out.shape[0], groups, span)
    if zeros is not None:
        number -= tl.load(zeros + place, mask=is_group, other=0.0).to(arithmetic)[:, :, None]
    if scaled:
        number *= tl.load(scales + place, mask=is_group, other=0.0).to(arithmetic)[:, :, None]
    if offsets is not None:
        number -= tl.load(offsets + place, mask=is_group, other=0.0).to(arithmetic)[:, :, None]
    return number.reshape(out.shape[0], tile_in).to(dtype)


# region exact
@triton.jit
def exact(bits, kind: tl.constexpr, centred: tl.constexpr, short: tl.constexpr):
    """The numbers in 16 bits, without converting integers: a power of two with an integer in its lowest bits is
    their sum. A register holds two 16-bit numbers, and one instruction computes both. One number of each kind:

    int4  -3 is stored as 5     0x4300 | 5 = 0x4305, in bfloat16 128 + 5. Less 128 + 8: -3
    int8  -3 is 0xFD            0xFD ^ 0x4B000080 = 0x4B00007D, in float32 2^23 + 125. Less 2^23 + 128: -3
    fp8   13 is 0 1010 101      a sign, 2^3, 1 + 5/8. In the places of float32 0 00001010 101, 13 * 2^-120
    """
    mantissa: tl.constexpr = 7 if short == tl.bfloat16 else 10  # its bits
    power: tl.constexpr = 1 << mantissa
    one: tl.constexpr = 0x4300 if short == tl.bfloat16 else 0x6400  # the bits of `power`
    if kind == "fp8":  # its exponent has fewer bits than a float32's, and another bias
        bits = ((bits.to(tl.uint32) << 24).to(tl.int32, bitcast=True) >> 4) & -0x78100000
        number = (bits.to(tl.float32, bitcast=True) * 2.0**120).to(short)
    elif kind == "int8":  # one bit more than a bfloat16 mantissa holds: by float32, as the lowest bits of 2 ** 23
        number = ((bits.to(tl.uint32) ^ 0x4B000080).to(tl.float32, bitcast=True) - (2.0**23 + 128)).to(short)
    else:
        less: tl.constexpr = power + 8.0 if centred else 1.0 * power
        lower, upper = (bits & 15).to(tl.uint16) | one, (bits >> 4).to(tl.uint16) | one
        number = tl.interleave(lower.to(short, bitcast=True) - less, upper.to(short, bitcast=True) - less)
    return number


# endregion


@jit()
def widen_kernel(
    values, scales, zeros, offsets,
    result,  # [outputs, inputs]
    outputs,
    inputs: tl.constexpr,
    group: tl.constexpr,
    kind: tl.constexpr,
    tile_out: tl.constexpr,
    tile_in: tl.constexpr,
):  # fmt: skip
    """Each program widens a tile of a weight."""
    out = (tl.program_id(0) * tile_out + tl.arange(0, tile_out)).to(tl.int64)[:, None]
    first = tl.program_id(1) * tile_in
    weight = load_weight(values, scales, zeros, offsets, out, out < outputs, first, inputs, group, kind, True,
                         tile_in, result.dtype.element_ty)  # fmt: skip
    i = first + tl.arange(0, tile_in)[None, :]
    tl.store(result + out * inputs + i, weight, mask=(out < outputs) & (i < inputs))


# region join
@jit(do_not_specialize=["rows"])
def join_splits_kernel(
    parts,  # [splits, rows, outputs] float32
    bias,  # [outputs], or None
    result,  # [rows, outputs]
    rows,
    outputs,
    splits: tl.constexpr,
    tile: tl.constexpr,
):
    """Each program adds the splits of some numbers of a row, in their order."""
    out = tl.program_id(1) * tile + tl.arange(0, tile)
    place = tl.program_id(0).to(tl.int64) * outputs + out
    total = tl.zeros([tile], tl.float32)
    for split in range(splits):
        total += tl.load(parts + split * rows.to(tl.int64) * outputs + place, mask=out < outputs, other=0.0)
    if bias is not None:
        total += tl.load(bias + out, mask=out < outputs, other=0.0).to(tl.float32)
    tl.store(result + place, total.to(result.dtype.element_ty), mask=out < outputs)


# endregion


class ProductTiling(NamedTuple):
    """The tile that a program computes, and how it is compiled."""

    rows: int
    outputs: int
    inputs: int
    num_warps: int
    num_stages: int


# region quantize_rows
@jit()
def quantize_rows_kernel(
    x,  # [rows, inputs]
    numbers,  # [rows, inputs] float8
    scales,  # [rows, 1] float32
    inputs: tl.constexpr,
    block_inputs: tl.constexpr,
):
    """Each program quantizes one row: its largest number becomes the largest of a float8."""
    i = tl.arange(0, block_inputs)
    place = tl.program_id(0).to(tl.int64) * inputs + i
    number = tl.load(x + place, mask=i < inputs, other=0.0).to(tl.float32)
    largest = tl.max(tl.abs(number), 0)
    scale = tl.where(largest == 0, 1.0, largest / LARGEST)
    number = tl.minimum(tl.maximum(number / scale, -LARGEST), LARGEST)
    tl.store(numbers + place, number.to(numbers.dtype.element_ty), mask=i < inputs)
    tl.store(scales + tl.program_id(0), scale)


# endregion


def quantize_rows_constants(inputs: int) -> dict[str, int]:
    block = triton.next_power_of_2(inputs)
    return {"inputs": inputs, "block_inputs": block, "num_warps": min(max(block // 512, 1), 16)}


def tiling(rows: int, itemsize: int, kind: str) -> ProductTiling:
    """The tiling for this many rows. With few rows a program loads more of the weight at once."""
    if itemsize == 4:  # float32 products take more registers and no tensor cores
        return ProductTiling(16, 64, 32, 4, 3) if rows <= 16 else ProductTiling(32, 64, 32, 4, 3)
    if rows <= 16:
        few = {"int4": (64, LONGEST_TILE, 4, 3), "int8": (64, LONGEST_TILE, 4, 4), "fp8": (32, LONGEST_TILE, 2, 3)}
        return ProductTiling(16, *few[kind])
    return ProductTiling(64, 64, LONGEST_TILE, 4, 3) if rows <= 64 else ProductTiling(128, 64, 64, 4, 3)


def split_of(outputs: int, inputs: int) -> int:
    """The inputs of a split: enough splits to fill a GPU with few rows, but none too small for a program."""
    splits = max(min(PROGRAMS // triton.cdiv(outputs, 64), inputs // SHORTEST), 1)
    return int(triton.cdiv(triton.cdiv(inputs, splits), LONGEST_TILE) * LONGEST_TILE)


@cache
def constants(
    outputs: int, inputs: int, group: int, kind: str, rows: int, itemsize: int
) -> tuple[dict[str, Any], dict[str, int]]:
    """The constants that product_kernel is compiled for, and the compiler's options, for this many rows."""
    tiles = tiling(rows, itemsize, kind)
    shape = {"inputs": inputs, "group": group, "kind": kind, "split": split_of(outputs, inputs)}
    tile = {"tile_rows": tiles.rows, "tile_out": tiles.outputs, "tile_in": tiles.inputs}
    return shape | tile, {"num_warps": tiles.num_warps, "num_stages": tiles.num_stages}


def widen_constants(inputs: int, group: int, kind: str) -> dict[str, Any]:
    """The constants that widen_kernel is compiled for."""
    return {"inputs": inputs, "group": group, "kind": kind, "tile_out": 32, "tile_in": 256}


KINDS = {torch.uint8: "int4", torch.int8: "int8", torch.float8_e4m3fn: "fp8"}


class TritonProduct:
    """rows @ weight.T + bias for a quantized weight on a GPU, which stays as stored.

    Nothing is read from the device, and the host knows all sizes of memory, so a launch can be captured.
    """

    ROWS = 1, 17, 65, MANY + 1  # numbers of rows that need each compiled variant

    def __init__(self, weight: QuantizedWeight, bias: Tensor | None = None) -> None:
        self.weight, self.bias, self.kind = weight.to(weight.device), bias, KINDS[weight.values.dtype]
        self.outputs, self.inputs = weight.shape
        if self.kind == "fp8":  # the kernels do not look for NaN: one makes NaN of its group's sum, as its scale does
            groups = self.weight.values.isnan().view(*weight.scales.shape, -1).any(-1)
            self.weight = replace(self.weight, scales=self.weight.scales.masked_fill(groups, torch.nan))
        self._values = self.weight.values.view(torch.uint8)

    @property
    def kernel(self) -> str:
        return f"{self.kind}, widened by Triton"

    def __call__(self, rows: Tensor, result: Tensor | None = None) -> Tensor:
        shape = len(rows), self.outputs
        if rows.shape[1] != self.inputs:
            raise ValueError(f"rows of {rows.shape[1]} numbers cannot be multiplied with {self.inputs} inputs")
        result = rows.new_empty(shape) if result is None else result
        if result.shape != shape or not result.is_contiguous():
            raise ValueError(f"the result must be contiguous, {list(shape)}, got {list(result.shape)}")
        if len(rows) > 0:
            order = self.weight.order
            with torch.cuda.device(rows.get_device()):
                self._launch(rows.contiguous() if order is None else rows[:, order], result)
        return result

    def _launch(self, rows: Tensor, result: Tensor) -> None:
        if len(rows) > MANY:
            self._widen(rows, result)
            return
        weight, (count, outputs) = self.weight, result.shape
        shape, options = constants(outputs, self.inputs, weight.group, self.kind, count, rows.element_size())
        splits = -(-self.inputs // shape["split"])
        sums, bias = result, self.bias
        if splits > 1:
            sums, bias = rows.new_empty((splits, *result.shape), dtype=torch.float32), None
        blocks = -(-count // shape["tile_rows"]), -(-outputs // shape["tile_out"])
        product_kernel[*blocks, splits](
            rows, self._values, weight.scales, weight.zeros, weight.offsets, bias, sums, count, outputs,
            **shape, **options,
        )  # fmt: skip
        if splits > 1:
            join_splits_kernel[count, -(-outputs // JOINED)](
                sums, self.bias, result, count, outputs, splits=splits, tile=JOINED
            )

    def _widen(self, rows: Tensor, result: Tensor) -> None:
        """Widen one block of the weight after another, and multiply by it."""
        shape = widen_constants(self.inputs, self.weight.group, self.kind)
        stored = self._values, self.weight.scales, self.weight.zeros, self.weight.offsets
        for first in range(0, self.outputs, WIDENED):
            block = slice(first, min(first + WIDENED, self.outputs))
            wide = rows.new_empty((block.stop - first, self.inputs))
            grid = -(-len(wide) // shape["tile_out"]), -(-self.inputs // shape["tile_in"])
            widen_kernel[grid](*(part if part is None else part[block] for part in stored), wide, len(wide), **shape)
            if self.bias is None:
                torch.mm(rows, wide.t(), out=result[:, block])
            else:
                torch.addmm(self.bias[block], rows, wide.t(), out=result[:, block])

    def rows(self, tokens: Tensor, dtype: torch.dtype) -> Tensor:
        """Rows of the weight, where it is also the embedding."""
        return self.weight.rows(tokens, dtype)

    def compile(self) -> None:
        """Compile all variants, which would happen at their first launch."""
        for count in self.ROWS:
            self(torch.zeros(count, self.inputs, dtype=self.weight.dtype, device=self.weight.device))


class Float8Product(TritonProduct):
    """The same for float8 with one scale per output. More than FEW rows are quantized too, each with its own scale
    (W8A8): tensor cores multiply float8 at twice the rate of 16 bits. Fewer rows wait for the weight either way."""

    def __init__(self, weight: QuantizedWeight, bias: Tensor | None = None) -> None:
        super().__init__(weight, bias)
        self._scales = weight.scales.float().t().contiguous()  # [1, outputs]

    @staticmethod
    def serves(weight: QuantizedWeight, capability: tuple[int, int]) -> bool:
        """Whether torch can compute the product of this weight on GPUs of this compute capability."""
        plain = weight.zeros is None and weight.offsets is None and weight.order is None
        rowwise = KINDS[weight.values.dtype] == "fp8" and weight.scales.shape[1] == 1 and plain
        return rowwise and weight.dtype == torch.bfloat16 and gcd(*weight.shape) % 16 == 0 and capability >= (8, 9)

    @property
    def kernel(self) -> str:
        return f"{super().kernel}; more than {FEW} rows in fp8 by torch"

    def _launch(self, rows: Tensor, result: Tensor) -> None:
        if len(rows) <= FEW:
            super()._launch(rows, result)
            return
        numbers = torch.empty_like(rows, dtype=torch.float8_e4m3fn)
        scales = rows.new_empty((len(rows), 1), dtype=torch.float32)
        quantize_rows_kernel[len(rows),](rows, numbers, scales, **quantize_rows_constants(self.inputs))
        torch._scaled_mm(
            numbers, self.weight.values.t(), scales, self._scales, self.bias, out_dtype=result.dtype, out=result
        )


def linear(weight: Matrix, bias: Tensor | None = None) -> Linear:
    """The linear layer of a GPU, for a weight of any format."""
    if isinstance(weight, tuple):
        return Joined(weight, bias, linear)
    if isinstance(weight, Tensor):
        return TorchLinear(weight, bias)
    assert isinstance(weight, QuantizedWeight)  # nothing else encodes rows, and a GPU streams none
    fits = Float8Product.serves(weight, torch.cuda.get_device_capability(weight.device))
    return (Float8Product if fits else TritonProduct)(weight, bias)


def compile_products(decoder: Decoder, kv_dtype: str | None = None, progress: bool = False) -> None:
    """Compile the kernels of a decoder's quantized weights and experts."""
    for product in every_product(decoder):
        if isinstance(product, Compiled):
            product.compile()

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""The grouped product of a GPU: each row with the matrix of its group, in one launch, for a weight of any format.

The host does not know how many rows a group has, so a launch can be captured: it starts as many programs as any groups
of this many rows could need, and a program finds its tile in the ends of the groups. Those left over do nothing. Plain
weights in bfloat16 are multiplied by torch, which has such a product for the GPUs from Hopper on.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from phase1_kv_pool.kernels.triton.launch import jit
from phase2_prefill_decode.extras.quantized.triton_product import LONGEST_TILE, TritonProduct, load_weight
from phase2_prefill_decode.kernels.triton.tiles import PRECISION
from phase2_prefill_decode.linear import Linear, TorchLinear

TILE_ROWS, TILE_OUT = 16, 64


# region grouped
@jit(do_not_specialize=["rows"])
def grouped_kernel(
    x,  # [rows, inputs]
    values,  # [groups * outputs, inputs], or as product_kernel takes it
    scales, zeros, offsets,  # as product_kernel takes them, or None
    ends,  # [groups] int32, the index after each group's last row
    result,  # [rows, outputs]
    rows,
    outputs: tl.constexpr,
    groups: tl.constexpr,
    block_groups: tl.constexpr,
    inputs: tl.constexpr,
    group: tl.constexpr,  # the inputs that share a scale
    kind: tl.constexpr,  # int4, int8, fp8 or plain
    tile_rows: tl.constexpr,
    tile_out: tl.constexpr,
    tile_in: tl.constexpr,
):  # fmt: skip
    """Each program computes a tile of the result: some rows of one group."""
    number = tl.arange(0, block_groups)
    stops = tl.load(ends + number, mask=number < groups, other=rows)
    starts = tl.load(ends + number - 1, mask=(number > 0) & (number <= groups), other=0)
    starts = tl.where(number > groups, rows, starts)
    tiles = (stops - starts + tile_rows - 1) // tile_rows
    after = tl.cumsum(tiles, 0)
    own = tl.sum((after <= tl.program_id(0)).to(tl.int32), 0)
    if own < groups:
        is_own = number == own
        tile = tl.program_id(0) - tl.sum(tl.where(is_own, after - tiles, 0), 0)
        start, stop = tl.sum(tl.where(is_own, starts, 0), 0), tl.sum(tl.where(is_own, stops, 0), 0)
        row = (start + tile * tile_rows + tl.arange(0, tile_rows)).to(tl.int64)[None, :]
        column = (tl.program_id(1) * tile_out + tl.arange(0, tile_out))[:, None]
        is_row, is_out, out = row < stop, column < outputs, own.to(tl.int64) * outputs + column
        total = tl.zeros([tile_out, tile_rows], tl.float32)
        for first in range(0, inputs, tile_in):
            if kind == "plain":
                j = first + tl.arange(0, tile_in)[None, :]
                weight = tl.load(values + out * inputs + j, mask=is_out & (j < inputs), other=0.0)
            else:
                weight = load_weight(values, scales, zeros, offsets, out, is_out, first, inputs, group, kind, True,
                                     tile_in, x.dtype.element_ty)  # fmt: skip
            i = first + tl.arange(0, tile_in)[:, None]
            part = tl.load(x + row * inputs + i, mask=is_row & (i < inputs), other=0.0)
            total = tl.dot(weight, part, total, input_precision=PRECISION)
        tl.store(result + row * outputs + column, total.to(result.dtype.element_ty), mask=is_row & is_out)


# endregion


class TritonGroups:
    """The matrices of all groups in one weight, one after the other."""

    def __init__(self, product: TorchLinear | TritonProduct, groups: int) -> None:
        self.groups, self.order = groups, None
        self._stored: tuple[Tensor | None, ...]
        if isinstance(product, TritonProduct):
            weight = product.weight
            self.kind, self.group, self.order = product.kind, weight.group, weight.order
            self._stored = product._values, weight.scales, weight.zeros, weight.offsets
            self.outputs, self.inputs = product.outputs // groups, product.inputs
            self._like = torch.zeros(0, dtype=weight.dtype, device=weight.device)
        else:
            self.kind, self._stored = "plain", (product.weight, None, None, None)
            self.outputs, self.inputs = len(product.weight) // groups, product.weight.shape[1]
            self.group, self._like = self.inputs, product.weight[:0, 0]

    def __call__(self, rows: Tensor, ends: Tensor) -> Tensor:
        rows = rows.contiguous() if self.order is None else rows[:, self.order]
        result = rows.new_empty(len(rows), self.outputs)
        most = len(rows) // TILE_ROWS + min(self.groups, len(rows))  # tiles of rows
        if most:
            with torch.cuda.device(rows.get_device()):
                grouped_kernel[most, triton.cdiv(self.outputs, TILE_OUT)](
                    rows, *self._stored, ends, result, len(rows), outputs=self.outputs, groups=self.groups,
                    block_groups=triton.next_power_of_2(self.groups + 1), inputs=self.inputs, group=self.group,
                    kind=self.kind, tile_rows=TILE_ROWS, tile_out=TILE_OUT,
                    tile_in=LONGEST_TILE if rows.element_size() < 4 else 32,
                )  # fmt: skip
        return result

    def compile(self) -> None:
        """Compile its kernel, which is the same for any rows."""
        rows, ends = self._like.new_zeros(1, self.inputs), self._like.new_ones(self.groups, dtype=torch.int32)
        self(rows, ends)


class TorchGroups:
    """torch's grouped product, which reads the ends of the groups on the device."""

    def __init__(self, weight: Tensor, groups: int) -> None:
        self._weight = weight.view(groups, -1, weight.shape[1]).transpose(1, 2)

    @staticmethod
    def serves(weight: Tensor, groups: int, capability: tuple[int, int]) -> bool:
        """Its rows must be multiples of 16 bytes."""
        aligned = weight.shape[1] % 8 == 0 and len(weight) // groups % 8 == 0
        return weight.dtype == torch.bfloat16 and aligned and capability >= (9, 0)

    def __call__(self, rows: Tensor, ends: Tensor) -> Tensor:
        return torch.nn.functional.grouped_mm(rows, self._weight, offs=ends)


def on_gpu(product: Linear, groups: int) -> TorchGroups | TritonGroups:
    """The fastest grouped product of a GPU."""
    assert isinstance(product, TorchLinear | TritonProduct)  # what `triton_product.linear` makes of one weight
    if isinstance(product, TorchLinear):
        capability = torch.cuda.get_device_capability(product.weight.device)
        if TorchGroups.serves(product.weight, groups, capability):
            return TorchGroups(product.weight, groups)
    return TritonGroups(product, groups)

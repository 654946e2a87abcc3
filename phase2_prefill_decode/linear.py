"""Linear: a matrix product with a weight that is packed once for the machine.

A model uses the same weights in every step. On a CPU they are packed when the model is loaded, for one product of any
number of rows, `kernels.cpu.product`: a row's result does not depend on the others. Quantized weights stay as small as
they are. On a GPU torch multiplies, and quantized weights are dequantized when they are loaded.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import linear

from phase2_prefill_decode.loading.quantized.weight import MIDDLE, Matrix, QuantizedWeight, Stream

if TYPE_CHECKING:
    from phase2_prefill_decode.kernels.cpu.product import PackedWeight


class Linear:
    """rows @ weight.T + bias. rows: [tokens, in]; weight: [out, in]; result: [tokens, out].

    A packed weight is a copy: the original is not kept alive, and later writes to it have no effect. Of several weights
    the results are put side by side.
    """

    packed: "PackedWeight | None" = None
    kernel = "torch"  # what multiplies

    def __init__(self, weight: Matrix, bias: Tensor | None = None) -> None:
        self._product: Callable[[Tensor], Tensor]
        self._plain: tuple[Tensor, Tensor | None] | None = None
        if isinstance(weight, tuple):
            self.kernel, self._product = _side_by_side(weight, bias)
        elif isinstance(weight, Stream) or weight.device.type == "cpu":
            from phase2_prefill_decode.kernels.cpu.microkernel import SET  # here: a GPU does not need numba

            self.packed = _packed(weight, bias)
            self.kernel, self._product = f"{self.packed.format}, packed for {SET}", self.packed
        elif isinstance(weight, QuantizedWeight):
            dense = Linear(weight.dequantize().to(weight.dtype), bias)
            self.kernel, self._product = f"{weight.bits} bits, dequantized when loaded; {dense.kernel}", dense
        else:
            self._plain = weight.t(), bias
            self._product = lambda rows: linear(rows, weight, bias)

    def __call__(self, rows: Tensor) -> Tensor:
        return self._product(rows)

    def into(self, out: Tensor, rows: Tensor) -> Tensor:
        """Write the result to `out`, which is contiguous; without a copy, but for several weights."""
        if self.packed is not None:
            return self.packed(rows, out)
        if self._plain is None:
            return out.copy_(self(rows))
        transposed, bias = self._plain
        return torch.mm(rows, transposed, out=out) if bias is None else torch.addmm(bias, rows, transposed, out=out)


def _packed(weight: Tensor | QuantizedWeight | Stream, bias: Tensor | None) -> "PackedWeight":
    """A weight in the layout of the CPU's product."""
    from phase2_prefill_decode.kernels.cpu.product import PackedWeight

    packed: PackedWeight | None = None
    for part in weight if isinstance(weight, Stream) else [weight]:
        numbers, scales, offsets, order = _parts(part)
        if packed is None:
            packed = PackedWeight(numbers, bias, scales, offsets, order, outputs=len(weight))
        else:
            packed.add(numbers, scales, offsets)
    assert packed is not None  # a matrix has rows
    return packed


def _parts(weight: Tensor | QuantizedWeight) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """The numbers of a weight, its scales, offsets and order. The product takes inputs in pairs: groups of an odd size
    are dequantized. It subtracts an offset from the sum of a group: what is subtracted from each number, times the
    scale."""
    if isinstance(weight, QuantizedWeight) and weight.group % 2 and weight.scales.shape[1] > 1:
        weight = weight.dequantize().to(weight.dtype)
    if isinstance(weight, Tensor):
        return weight, None, None, None
    # region exercise 2.28
    scales = weight.scales.float()
    if weight.offsets is not None:
        offsets: Tensor | None = weight.offsets.float()
    elif weight.zeros is not None:
        offsets = weight.zeros.float() * scales
    else:
        offsets = scales * MIDDLE if weight.bits == 4 else None
    return weight.values, scales, offsets, weight.order
    # endregion


def _side_by_side(
    weights: Sequence[Tensor | QuantizedWeight | Stream], bias: Tensor | None
) -> tuple[str, Callable[[Tensor], Tensor]]:
    biases = [None] * len(weights) if bias is None else torch.split(bias, [len(weight) for weight in weights])
    products = [Linear(weight, own) for weight, own in zip(weights, biases, strict=True)]
    kernels = dict.fromkeys(product.kernel for product in products)
    return " and ".join(kernels), lambda rows: torch.cat([product(rows) for product in products], -1)

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

from phase2_prefill_decode.loading.quantized.weight import MIDDLE, Matrix, QuantizedWeight

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
        elif weight.device.type == "cpu":
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


def _packed(weight: Tensor | QuantizedWeight, bias: Tensor | None) -> "PackedWeight":
    """A weight in the layout of the CPU's product, in which numbers are around 0: those of 4 bits less MIDDLE. From the
    sum of a group it subtracts an offset: what is then to be subtracted from each number, times the scale. It has none
    for float8."""
    from phase2_prefill_decode.kernels.cpu.product import PackedWeight

    if isinstance(weight, QuantizedWeight) and weight.values.is_floating_point() and not weight.is_centred:
        weight = weight.dequantize().to(weight.dtype)
    if isinstance(weight, Tensor):
        return PackedWeight(weight, bias)
    # region exercise 2.28
    scales, middle = weight.scales.float(), MIDDLE if weight.bits == 4 else 0
    if weight.offsets is not None:
        offsets: Tensor | None = weight.offsets.float() - middle * scales
    elif weight.zeros is not None:
        offsets = (weight.zeros.float() - middle) * scales
    else:
        offsets = None
    return PackedWeight(weight.values, bias, scales, offsets, weight.order)
    # endregion


def _side_by_side(
    weights: Sequence[Tensor | QuantizedWeight], bias: Tensor | None
) -> tuple[str, Callable[[Tensor], Tensor]]:
    biases = [None] * len(weights) if bias is None else torch.split(bias, [len(weight) for weight in weights])
    products = [Linear(weight, own) for weight, own in zip(weights, biases, strict=True)]
    kernels = dict.fromkeys(product.kernel for product in products)
    return " and ".join(kernels), lambda rows: torch.cat([product(rows) for product in products], -1)

"""Linear: a matrix product with a weight that is packed once for the machine.

A model uses the same weights in every step. On a CPU they are packed when the model is loaded, for one product of any
number of rows, `kernels.cpu.product`: a row's result does not depend on the others. On a GPU torch multiplies.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import linear

if TYPE_CHECKING:
    from phase2_prefill_decode.kernels.cpu.product import PackedWeight


class Linear:
    """rows @ weight.T + bias. rows: [tokens, in]; weight: [out, in]; result: [tokens, out].

    A packed weight is a copy: the original is not kept alive, and later writes to it have no effect.
    """

    packed: "PackedWeight | None" = None
    kernel = "torch"  # what multiplies

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        if weight.device.type == "cpu":
            from phase2_prefill_decode.kernels.cpu.microkernel import SET  # here: a GPU does not need numba
            from phase2_prefill_decode.kernels.cpu.product import PackedWeight

            self.packed, self.kernel = PackedWeight(weight, bias), f"packed weights, {SET}"
        else:
            self._weight, self._bias = weight, bias

    def __call__(self, rows: Tensor) -> Tensor:
        return linear(rows, self._weight, self._bias) if self.packed is None else self.packed(rows)

    def into(self, out: Tensor, rows: Tensor) -> Tensor:
        """Write the result to `out`, which is contiguous, without a copy."""
        if self.packed is not None:
            return self.packed(rows, out)
        if self._bias is None:
            return torch.mm(rows, self._weight.t(), out=out)
        return torch.addmm(self._bias, rows, self._weight.t(), out=out)

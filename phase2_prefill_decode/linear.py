"""Linear: a matrix product with a weight that is packed once for the machine.

torch hands a bfloat16 product on a CPU to oneDNN, which wants the weight in a blocked layout and repacks it in every
call. A model uses the same weights in every step, so they are packed here when the model is loaded. The operators for
that are private to torch. If they are missing or refuse, the plain product gives the same result, more slowly.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import linear

Product = Callable[[Tensor], Tensor]


class Linear:
    """rows @ weight.T + bias. rows: [tokens, in]; weight: [out, in]; result: [tokens, out].

    A packed weight is a copy: the original is not kept alive, and later writes to it have no effect.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        packed = _packed(weight, bias)
        self.is_packed = packed is not None
        self._product = packed or (lambda rows: linear(rows, weight, bias))

    def __call__(self, rows: Tensor) -> Tensor:
        return self._product(rows)


def _packed(weight: Tensor, bias: Tensor | None) -> Product | None:
    """The product with the weight in oneDNN's layout, or None if that is not available."""
    if weight.device.type != "cpu" or weight.dtype != torch.bfloat16:
        return None
    try:
        blocks = torch.ops.mkldnn._reorder_linear_weight(weight)
        multiply = torch.ops.mkldnn._linear_pointwise.default
        multiply(weight.new_zeros(1, weight.shape[1]), blocks, bias, "none", [], "")
    except (AttributeError, RuntimeError):
        return None
    return lambda rows: multiply(rows, blocks, bias, "none", [], "")

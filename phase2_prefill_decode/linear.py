"""Linear: a matrix product with a weight that is packed once for the machine.

torch hands a bfloat16 product on a CPU to oneDNN, which wants the weight in a blocked layout and repacks it in every
call. A model uses the same weights in every step, so they are packed here when the model is loaded. The operators for
that are private to torch.

oneDNN refuses 16-bit floats that the processor cannot multiply: bfloat16 where AVX2 is all it has, float16 nearly
everywhere. torch then multiplies them in a scalar loop. With few rows that loop still waits for memory. For several
rows the weight is widened to float32 in the call, one panel of its rows at a time: products of float32 are fast on any
processor. A weight that is widened once, at load, would be twice as long to read for one row, and twice the memory.

A row of the result depends on that row of the input, and on how many rows there are: each kernel, and few or several,
add in an order of their own. It never depends on what the other rows hold.
"""

from collections.abc import Callable, Sequence
from enum import StrEnum

import torch
from torch import Tensor
from torch.nn.functional import linear

from phase2_prefill_decode.loading.quantized.weight import Matrix, QuantizedWeight

SEVERAL = 6  # rows: from here on a widened weight is faster
PANEL = 4 << 20  # bytes of a panel in float32: it stays in the processor's cache between widening and product

Product = Callable[[Tensor], Tensor]


class LinearPath(StrEnum):
    """How a Linear computes."""

    PACKED = "oneDNN, packed weights"
    WIDENED = f"weights widened to float32 from {SEVERAL} rows on"
    PLAIN = "torch"


class Linear:
    """rows @ weight.T + bias. rows: [tokens, in]; weight: [out, in]; result: [tokens, out].

    A packed weight is a copy: the original is not kept alive, and later writes to it have no effect. Of several weights
    the results are put side by side.
    """

    kernel: str  # how it computes

    def __init__(self, weight: Matrix, bias: Tensor | None = None) -> None:
        if isinstance(weight, tuple):
            self.kernel, self._product = _side_by_side(weight, bias)
        elif isinstance(weight, QuantizedWeight):
            of_16_bits = Linear(weight.dequantize().to(weight.dtype), bias)
            self.kernel, self._product = f"{weight.bits} bits, dequantized when loaded; {of_16_bits.kernel}", of_16_bits
        elif weight.device.type == "cpu" and weight.dtype in (torch.bfloat16, torch.float16):
            self.kernel, self._product = _packed(weight, bias) or _widened(weight, bias)
        else:
            self.kernel, self._product = LinearPath.PLAIN, lambda rows: linear(rows, weight, bias)
        plain = isinstance(weight, Tensor) and self.kernel is LinearPath.PLAIN and bias is None
        self._transposed = weight.t() if plain and isinstance(weight, Tensor) else None

    def __call__(self, rows: Tensor) -> Tensor:
        return self._product(rows)

    def into(self, out: Tensor, rows: Tensor) -> Tensor:
        """Write the result to `out`. Where torch multiplies, without a bias, nothing is copied."""
        return out.copy_(self(rows)) if self._transposed is None else torch.mm(rows, self._transposed, out=out)


def _side_by_side(weights: Sequence[Tensor | QuantizedWeight], bias: Tensor | None) -> tuple[str, Product]:
    biases = [None] * len(weights) if bias is None else torch.split(bias, [len(weight) for weight in weights])
    products = [Linear(weight, own) for weight, own in zip(weights, biases, strict=True)]
    kernels = dict.fromkeys(product.kernel for product in products)
    return " and ".join(kernels), lambda rows: torch.cat([product(rows) for product in products], -1)


def _packed(weight: Tensor, bias: Tensor | None) -> tuple[LinearPath, Product] | None:
    """The product with the weight in oneDNN's layout, or None if that is not available."""
    try:
        blocks = torch.ops.mkldnn._reorder_linear_weight(weight)
        multiply = torch.ops.mkldnn._linear_pointwise.default
        multiply(weight.new_zeros(1, weight.shape[1]), blocks, bias, "none", [], "")
    except (AttributeError, RuntimeError):
        return None
    return LinearPath.PACKED, lambda rows: multiply(rows, blocks, bias, "none", [], "")


def _widened(weight: Tensor, bias: Tensor | None) -> tuple[LinearPath, Product]:
    """The product that computes several rows in float32."""
    out, width = weight.shape
    size = max(PANEL // (4 * width), 1)
    panels = torch.split(weight, size)
    biases = [None] * len(panels) if bias is None else torch.split(bias.float(), size)

    def multiply(rows: Tensor) -> Tensor:
        if len(rows) < SEVERAL:
            return linear(rows, weight, bias)
        wide, result = rows.float(), rows.new_empty(len(rows), out)
        for panel, own, columns in zip(panels, biases, torch.split(result, size, dim=1), strict=True):
            columns.copy_(linear(wide, panel.float(), own))
        return result

    return LinearPath.WIDENED, multiply

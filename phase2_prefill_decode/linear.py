"""Linear: a matrix product with a weight that is packed once for the machine.

A model uses the same weights in every step. On a CPU they are packed when the model is loaded, for one product of any
number of rows, `kernels.cpu.product`: a row's result does not depend on the others. Quantized weights stay as small as
they are. On a GPU torch multiplies, and a kernel of ours if the weight is quantized, `kernels.triton.product`.
"""

from collections.abc import Callable, Sequence
from copy import copy
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import linear

from phase1_kv_pool.kernels import prepare_triton
from phase2_prefill_decode.extras.quantized.weight import MIDDLE, QuantizedWeight
from phase2_prefill_decode.loading.matrix import Stream

if TYPE_CHECKING:
    from phase2_prefill_decode.extras.cpu.product import PackedWeight
    from phase2_prefill_decode.extras.quantized.triton_product import TritonProduct


class Product(Protocol):
    """rows @ weight.T + bias, written to `out` if that is given."""

    def __call__(self, rows: Tensor, out: Tensor | None = None, /) -> Tensor: ...


class Linear:
    """rows @ weight.T + bias. rows: [tokens, in]; weight: [out, in]; result: [tokens, out].

    A packed weight is a copy: the original is not kept alive, and later writes to it have no effect. Of several weights
    the results are put side by side.
    """

    packed: "Sequence[PackedWeight]" = ()  # on a CPU
    on_gpu: "Sequence[TritonProduct]" = ()  # of quantized weights
    kernel = "torch"  # what multiplies

    def __init__(self, weight: Any, bias: Tensor | None = None) -> None:
        self._product: Product
        if isinstance(weight, tuple):
            linears = _each(weight, bias)
            self.kernel = " and ".join(dict.fromkeys(each.kernel for each in linears))
            self.packed = [packed for each in linears for packed in each.packed]
            self.on_gpu = [product for each in linears for product in each.on_gpu]
            self._product = lambda rows, out=None: torch.cat([each(rows) for each in linears], -1, out=out)
        elif isinstance(weight, Stream) or weight.device.type == "cpu":
            from phase2_prefill_decode.extras.cpu.microkernel import SET  # here: a GPU does not need numba

            packed = _packed(weight, bias)
            self.packed, self._product = [packed], packed
            self.kernel = f"{packed.format}, packed for {SET}"
        elif isinstance(weight, QuantizedWeight):
            prepare_triton()
            from phase2_prefill_decode.extras.quantized.triton_product import product_of

            self.on_gpu = [product_of(weight, bias)]
            self.kernel, self._product = self.on_gpu[0].kernel, self.on_gpu[0]
        else:
            self._product = plain(weight, bias)

    def __call__(self, rows: Tensor) -> Tensor:
        return self._product(rows)

    def wrapped(self, wrap: Callable[[Product], Product]) -> "Linear":
        """The same weight with another product, made of this one's."""
        made = copy(self)
        made._product = wrap(self._product)
        return made

    def into(self, out: Tensor, rows: Tensor) -> Tensor:
        """Write the result to `out`, which is contiguous; without a copy, but for several weights."""
        return self._product(rows, out)


def plain(weight: Tensor, bias: Tensor | None) -> Product:
    """The product of torch."""
    transposed = weight.t()

    def product(rows: Tensor, out: Tensor | None = None) -> Tensor:
        if out is None:
            return linear(rows, weight, bias)
        return torch.mm(rows, transposed, out=out) if bias is None else torch.addmm(bias, rows, transposed, out=out)

    return product


def _packed(weight: Tensor | QuantizedWeight | Stream, bias: Tensor | None) -> "PackedWeight":
    """A weight in the layout of the CPU's product."""
    from phase2_prefill_decode.extras.cpu.product import PackedWeight

    packed: PackedWeight | None = None
    for part in weight if isinstance(weight, Stream) else [weight]:
        numbers, scales, offsets, order = _parts(part)
        if packed is None:
            packed = PackedWeight(numbers, bias, scales, offsets, order, outputs=len(weight))
        else:
            packed.add(numbers, scales, offsets)
    assert packed is not None  # a matrix has rows
    return packed


def _parts(weight: Any) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """The numbers of a weight, its scales, offsets and order. In the CPU's product, numbers are around 0: those of 4
    bits less MIDDLE. From the sum of a group it subtracts an offset: what is then to be subtracted from each number,
    times the scale. It has none for float8."""
    if isinstance(weight, QuantizedWeight) and weight.values.is_floating_point() and not weight.is_centred:
        weight = weight.dequantize().to(weight.dtype)
    if isinstance(weight, Tensor):
        return weight, None, None, None
    # region exercise 2.28
    scales, middle = weight.scales.float(), MIDDLE if weight.bits == 4 else 0
    if weight.offsets is not None:
        offsets: Tensor | None = weight.offsets.float() - middle * scales
    elif weight.zeros is not None:
        offsets = (weight.zeros.float() - middle) * scales
    else:
        offsets = None
    return weight.values, scales, offsets, weight.order
    # endregion


def _each(weights: Sequence[Tensor | QuantizedWeight | Stream], bias: Tensor | None) -> list[Linear]:
    biases = [None] * len(weights) if bias is None else torch.split(bias, [len(weight) for weight in weights])
    return [Linear(weight, own) for weight, own in zip(weights, biases, strict=True)]

"""The backend of a CPU: kernels that numba compiles, and weights that are packed once, when the model is loaded."""

from torch import Tensor

from phase2_prefill_decode.backend import Backend
from phase2_prefill_decode.extras.cpu.attention import attend
from phase2_prefill_decode.extras.cpu.compilation import compile_decoder
from phase2_prefill_decode.extras.cpu.draw import draw
from phase2_prefill_decode.extras.cpu.forward import whole_step
from phase2_prefill_decode.extras.cpu.pointwise import add_norm, rotate_store, swiglu
from phase2_prefill_decode.extras.cpu.product import PackedWeight
from phase2_prefill_decode.extras.linears import Joined
from phase2_prefill_decode.extras.quantized.weight import MIDDLE, QuantizedWeight
from phase2_prefill_decode.extras.streams import Matrix, Rows, Stream, weights_for_cpu
from phase2_prefill_decode.linear import Linear


def packed_linear(weight: Matrix, bias: Tensor | None = None) -> Linear:
    """Pack a weight for this machine. It is a copy: the original is not kept alive."""
    if isinstance(weight, tuple):
        return Joined(weight, bias, packed_linear)
    packed: PackedWeight | None = None
    for part in weight if isinstance(weight, Stream) else [weight]:
        numbers, scales, offsets, order = _parts(part)
        if scales is not None:
            assert isinstance(part, QuantizedWeight)
            scales = scales.to(part.stored_scales)
        if packed is None:
            packed = PackedWeight(numbers, bias, scales, offsets, order, outputs=len(weight))
        else:
            packed.add(numbers, scales, offsets)
    assert packed is not None  # a matrix has rows
    return packed


def _parts(weight: Rows) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """The numbers of a weight, its scales, offsets and order. In the CPU's product, numbers are around 0: those of 4
    bits less MIDDLE. From the sum of a group it subtracts an offset: what is then to be subtracted from each number,
    times the scale. It has none for float8."""
    if isinstance(weight, QuantizedWeight) and weight.values.is_floating_point() and not weight.is_centred:
        weight = weight.dequantize().to(weight.dtype)
    if isinstance(weight, Tensor):
        return weight, None, None, None
    assert isinstance(weight, QuantizedWeight)
    # region exercise 9.6
    scales, middle = weight.scales.float(), MIDDLE if weight.bits == 4 else 0
    if weight.offsets is not None:
        offsets: Tensor | None = weight.offsets.float() - middle * scales
    elif weight.zeros is not None:
        offsets = (weight.zeros.float() - middle) * scales
    else:
        offsets = None
    return weight.values, scales, offsets, weight.order
    # endregion


CPU = Backend(
    attend, add_norm, rotate_store, swiglu, draw, weights_for_cpu, packed_linear, whole_step, compile_decoder
)  # fmt: skip

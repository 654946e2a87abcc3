"""Quantizes a matrix when it is loaded, to the nearest numbers, without sample data."""

from collections.abc import Callable

import torch
from torch import Tensor

from phase2_prefill_decode.extras.quantized.layout import SCHEMES
from phase2_prefill_decode.extras.quantized.weight import MIDDLE, QuantizedWeight, packed

GROUP = 32  # inputs that share a scale in 4 bits
AT_ONCE = {"cpu": 1 << 17, "cuda": 1 << 25}  # numbers: the cache of a CPU holds their float32 copies
LARGEST = 8.5, 8.0, 7.5, 7.0, 6.5  # steps to the largest number of a group in 4 bits, of which the best is chosen


def quantize(weight: Tensor, scheme: str) -> QuantizedWeight:
    """The weight in one of SCHEMES."""
    if weight.shape[1] % GROUP and scheme == "int4":
        raise ValueError(f"int4 needs a multiple of {GROUP} inputs, and a matrix has {weight.shape[1]}")
    step = max(AT_ONCE[weight.device.type] // weight.shape[1], 1)
    parts = [QUANTIZERS[scheme](rows.float()) for rows in torch.split(weight, step)]
    values, scales = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
    return QuantizedWeight(values=values, scales=scales, dtype=weight.dtype)


# region exercise 9.1
def _int8(rows: Tensor) -> tuple[Tensor, Tensor]:
    scales = _nonzero(rows.abs().amax(1, keepdim=True) / 127)
    return (rows / scales).round().to(torch.int8), scales


# endregion


def _fp8(rows: Tensor) -> tuple[Tensor, Tensor]:
    largest = torch.finfo(torch.float8_e4m3fn).max
    scales = _nonzero(rows.abs().amax(1, keepdim=True) / largest)
    return (rows / scales).clamp(-largest, largest).to(torch.float8_e4m3fn), scales


# region exercise 9.1
def _int4(rows: Tensor) -> tuple[Tensor, Tensor]:
    """The number with the largest magnitude is about -8 times the scale. Of several scales, a group keeps the one
    with the smallest squared error."""
    grouped = rows.view(len(rows), -1, GROUP)
    largest = grouped.gather(2, grouped.abs().argmax(2, keepdim=True))
    least, scales = torch.full_like(largest, torch.inf), torch.ones_like(largest)
    for steps in LARGEST:
        tried = _nonzero((largest / -steps).bfloat16().float())
        errors = (_nearest(grouped, tried) * tried - grouped).square().sum(2, keepdim=True)
        scales, least = torch.where(errors < least, tried, scales), torch.minimum(errors, least)
    numbers = (_nearest(grouped, scales) + MIDDLE).to(torch.uint8).flatten(1)
    return packed(numbers), scales.squeeze(2).bfloat16()


# endregion


QUANTIZERS: dict[str, Callable[[Tensor], tuple[Tensor, Tensor]]] = dict(zip(SCHEMES, (_int8, _int4, _fp8), strict=True))


def _nearest(grouped: Tensor, scales: Tensor) -> Tensor:
    return (grouped / scales).round().clamp(-MIDDLE, MIDDLE - 1)


def _nonzero(scales: Tensor) -> Tensor:
    """Scales without zeros: numbers that are all zero may have any scale."""
    return torch.where(scales == 0, 1, scales)

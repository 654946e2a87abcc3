"""Converts the numbers of a checkpoint to the numbers of a QuantizedWeight."""

import torch
from torch import Tensor

from phase0_request.support.checks import ConfigError
from phase2_prefill_decode.extras.quantized.weight import MIDDLE, unpacked


def bytes_of(words: Tensor) -> Tensor:
    """A copy of the words of each row as bytes, the lowest bits first."""
    return words.clone(memory_format=torch.contiguous_format).view(torch.uint8)


def values_of(words: Tensor, bits: int) -> Tensor:
    """The numbers in the words of each row, as the values of a QuantizedWeight. 8 bits are stored around 128."""
    values = bytes_of(words)
    return values if bits == 4 else (values ^ 128).view(torch.int8)


def whole_numbers(words: Tensor, bits: int) -> Tensor:
    """The same numbers, each in a byte."""
    values = bytes_of(words)
    return unpacked(values) if bits == 4 else values


# region exercise 9.3
def order_of(group_of: Tensor, size: int) -> Tensor | None:
    """The order of the inputs that brings each group together; None if they are together already. With act-order,
    GPTQ groups inputs by importance, wherever they are in the matrix."""
    order = torch.argsort(group_of, stable=True)
    inputs = torch.arange(len(group_of))
    if not torch.equal(group_of[order].long(), inputs // (len(inputs) if size == -1 else size)):
        raise ConfigError(f"its g_idx must put {size} inputs into each group")
    return None if torch.equal(order, inputs) else order


# endregion


def zeros_of(numbers: Tensor, bits: int, scales: Tensor) -> Tensor | None:
    """Zero points as a QuantizedWeight has them, from numbers that start at 0; None if they are the ones it assumes
    without any."""
    zeros = numbers.to(scales.dtype) - (0 if bits == 4 else 128)
    return None if bool((zeros == (MIDDLE if bits == 4 else 0)).all()) else zeros

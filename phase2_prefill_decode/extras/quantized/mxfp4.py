"""MXFP4: blocks of 32 numbers of 4 bits (e2m1) that share a power of two (e8m0). In 8 bits they are the same numbers:
twice each of them is whole, and a power of two is a scale."""

import torch
from torch import Tensor

from phase2_prefill_decode.extras.quantized.weight import QuantizedWeight, unpacked

BLOCK = 32
TWICE = 0, 1, 2, 3, 4, 6, 8, 12  # twice the sizes that 3 bits stand for; the fourth bit is the sign
BIAS = 127  # of the exponents


def of_blocks(blocks: Tensor, exponents: Tensor) -> QuantizedWeight:
    """The matrix of blocks [out, in / 32, 16] of bytes, whose low bits come first, and exponents [out, in / 32]."""
    return of_numbers(unpacked(blocks.flatten(1)), exponents)


def of_numbers(numbers: Tensor, exponents: Tensor) -> QuantizedWeight:
    """The matrix of numbers [out, in], of 4 bits in a byte each."""
    values = torch.tensor([*TWICE, *(-size for size in TWICE)], dtype=torch.int8)
    scales = torch.ldexp(torch.ones(exponents.shape), exponents.int() - BIAS - 1)
    return QuantizedWeight(values=values[numbers.int()], scales=scales, file_scales=torch.bfloat16)

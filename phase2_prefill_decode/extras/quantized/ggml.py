"""The blocks of llama.cpp's quantized tensors. A block is 32 or 256 neighbouring numbers of a row, with its scales.

`Q8_0` to `Q4_0` have one scale per 32 numbers. The K types have a scale and a minimum per 32 (`Q6_K`: a scale per 16),
in 6 or 8 bits, and these have scales of their own per 256. All products are exact in float32.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from phase2_prefill_decode.extras.quantized.mxfp4 import of_numbers
from phase2_prefill_decode.extras.quantized.weight import QuantizedWeight, packed


def _q8_0(blocks: Tensor) -> QuantizedWeight:
    return _with_halves(blocks[..., 2:].flatten(1).view(torch.int8), blocks)


def _q4_0(blocks: Tensor) -> QuantizedWeight:
    return _with_halves(packed(_halves(blocks[..., 2:]).flatten(1)), blocks)


def _q4_1(blocks: Tensor) -> QuantizedWeight:
    scales, offsets = _half(blocks, 0).flatten(1), -_half(blocks, 2).flatten(1)
    return QuantizedWeight(values=packed(_halves(blocks[..., 4:]).flatten(1)), scales=scales, offsets=offsets)


def _q5_0(blocks: Tensor) -> QuantizedWeight:
    fifth = (blocks[..., 2:6, None] >> torch.arange(8, dtype=torch.uint8)).flatten(2) & 1
    numbers = _halves(blocks[..., 6:]) | fifth << 4
    return _with_halves((numbers.view(torch.int8) - 16).flatten(1), blocks)


def _q4_k(blocks: Tensor) -> QuantizedWeight:
    scales, offsets = _scales_and_offsets(blocks)
    return QuantizedWeight(values=packed(_pairs(blocks[..., 16:]).flatten(1)), scales=scales, offsets=offsets)


def _q5_k(blocks: Tensor) -> QuantizedWeight:
    scales, offsets = _scales_and_offsets(blocks)
    fifth = (blocks[..., None, 16:48] >> torch.arange(8, dtype=torch.uint8)[:, None]) & 1
    numbers = _pairs(blocks[..., 48:]) | fifth << 4
    return QuantizedWeight(values=numbers.flatten(1).view(torch.int8), scales=scales, offsets=offsets)


def _q6_k(blocks: Tensor) -> QuantizedWeight:
    low = torch.stack([blocks[..., start : start + 64] >> shift & 15 for start in (0, 64) for shift in (0, 4)], 2)
    starts, shifts = (128, 160), (0, 2, 4, 6)
    high = torch.stack([blocks[..., start : start + 32] >> shift & 3 for start in starts for shift in shifts], 2)
    numbers = low.flatten(2) | high.flatten(2) << 4
    scales = _half(blocks, 208) * blocks[..., 192:208].view(torch.int8)
    return QuantizedWeight(values=(numbers.view(torch.int8) - 32).flatten(1), scales=scales.flatten(1))


def _mxfp4(blocks: Tensor) -> QuantizedWeight:
    return of_numbers(_halves(blocks[..., 1:]).flatten(1), blocks[..., 0])


class BlockType(NamedTuple):
    name: str
    numbers: int  # in a block
    bytes: int
    read: Callable[[Tensor], QuantizedWeight]  # takes blocks: uint8 [out, blocks of a row, bytes]


FLOATS = {0: ("F32", torch.float32), 1: ("F16", torch.float16), 30: ("BF16", torch.bfloat16)}
BLOCKS = {
    2: BlockType("Q4_0", 32, 18, _q4_0),
    3: BlockType("Q4_1", 32, 20, _q4_1),
    6: BlockType("Q5_0", 32, 22, _q5_0),
    8: BlockType("Q8_0", 32, 34, _q8_0),
    12: BlockType("Q4_K", 256, 144, _q4_k),
    13: BlockType("Q5_K", 256, 176, _q5_k),
    14: BlockType("Q6_K", 256, 210, _q6_k),
    39: BlockType("MXFP4", 32, 17, _mxfp4),
}
READABLE = ", ".join([name for name, _ in FLOATS.values()] + [block.name for block in BLOCKS.values()])
OTHERS = {
    7: "Q5_1", 9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S",
    20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS",
    29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 40: "NVFP4",
}  # fmt: skip


def _half(blocks: Tensor, start: int) -> Tensor:
    """One float16 per block."""
    return blocks[..., start : start + 2].contiguous().view(torch.float16).float()


def _with_halves(values: Tensor, blocks: Tensor) -> QuantizedWeight:
    """A weight whose scales are the float16 at the beginning of each block."""
    return QuantizedWeight(values=values, scales=_half(blocks, 0).flatten(1), file_scales=torch.float16)


def _halves(values: Tensor) -> Tensor:
    """4-bit numbers: the low halves of all bytes, then the high halves."""
    return torch.cat((values & 15, values >> 4), -1)


def _pairs(values: Tensor) -> Tensor:
    """The same for every 32 bytes of a block: [out, blocks, 8, 32]."""
    return _halves(values.reshape(*values.shape[:2], -1, 32)).view(*values.shape[:2], -1, 32)


def _scales_and_offsets(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """The scales and offsets of Q4_K and Q5_K: eight of each per block, of 6 bits. The first four lie in bytes of
    their own. The lower 4 bits of the others share bytes, and their upper 2 are in the free bits of the first four."""
    first, second, rest = blocks[..., 4:8], blocks[..., 8:12], blocks[..., 12:16]
    scales = torch.cat((first & 63, rest & 15 | first >> 6 << 4), -1)
    offsets = torch.cat((second & 63, rest >> 4 | second >> 6 << 4), -1)
    return (_half(blocks, 0) * scales).flatten(1), (_half(blocks, 2) * offsets).flatten(1)

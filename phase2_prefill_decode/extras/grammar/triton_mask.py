# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""Bit masks of tokens on a GPU: one pass over the logits."""

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 1024  # tokens of a program


# region exercise 8.2
@triton.jit
def apply_mask_kernel(
    logits,  # [rows, stride]
    stride,
    bits,  # [masks, words] int32
    numbers,  # [rows] int64
    masked,  # [rows, vocab]
    vocab,
    words,
    tile: tl.constexpr,
):
    """Each program takes one tile of a row."""
    row, token = tl.program_id(0).to(tl.int64), tl.program_id(1) * tile + tl.arange(0, tile)
    number = tl.load(numbers + row)
    word = tl.load(bits + tl.maximum(number, 0) * words + token // 32, mask=token < vocab, other=0)
    x = tl.load(logits + row * stride + token, mask=token < vocab, other=0.0)
    allowed = ((word >> (token % 32)) & 1 != 0) | (number < 0) | (x != x)
    x = tl.where(allowed, x, -float("inf"))
    tl.store(masked + row * vocab + token, x, mask=token < vocab)


# endregion


def apply_mask(logits: Tensor, bits: Tensor, numbers: Tensor) -> Tensor:
    rows, vocab = logits.shape
    masked = torch.empty_like(logits, memory_format=torch.contiguous_format)
    grid = rows, -(-vocab // TILE)
    with torch.cuda.device(logits.get_device()):
        apply_mask_kernel[grid](
            logits, logits.stride(0), bits, numbers, masked, vocab, bits.shape[1], TILE, num_warps=4
        )
    return masked

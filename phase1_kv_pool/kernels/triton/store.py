# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""Store keys or values in pages on a GPU: the part of a kernel that computes them. Phase 2's norms and rotates them."""

import torch
import triton
import triton.language as tl

from phase1_kv_pool.layer import HIGHEST, LOWEST_PEAK

INT8, FLOAT8 = (tl.constexpr(highest) for highest in HIGHEST.values())
LOWEST_BITS = tl.constexpr(int(torch.tensor(LOWEST_PEAK).view(torch.int32)))  # floats above 0 order as their bits do


@triton.jit
def peak(x):
    """The bits of the largest number of each row: those of a number that is not finite are above all others."""
    return tl.max(x.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1)


@triton.jit
def scale_of(peaks, dtype: tl.constexpr):
    """The scale of each row, from its largest number: see `quantize` in `phase1_kv_pool.layer`."""
    highest: tl.constexpr = INT8 if dtype == tl.int8 else FLOAT8
    largest = tl.maximum(peaks, LOWEST_BITS).to(tl.float32, bitcast=True)
    return tl.div_rn(largest, tl.full(largest.shape, highest, tl.float32))


@triton.jit
def scaled(x, scales, dtype: tl.constexpr):
    """Rows as 8-bit numbers."""
    is_finite = scales < float("inf")
    factors = tl.where(is_finite, tl.div_rn(tl.full(scales.shape, 1.0, tl.float32), scales), 0.0)
    numbers = tl.where(is_finite[:, None], x.to(tl.float32), 0.0) * factors[:, None]
    if dtype == tl.int8:
        numbers = tl.floor(numbers + 0.5)
    return numbers.to(dtype)


@triton.jit
def store_heads(
    side,  # [pages, kv_heads, page_size, 2 * half]: keys, or values
    scales,  # [pages, kv_heads, page_size], or None, unless they are stored in 8 bits
    slot,  # [tokens] int64; -1: padding
    head,
    first,  # [tokens, block_half]: the first half of this head of each token
    second,
    kv_heads: tl.constexpr,
    page_size: tl.constexpr,
    half: tl.constexpr,  # of head_dim
    block_half: tl.constexpr,  # rounded up to a power of two
):
    """Store one head of some tokens, which comes in two halves, as the rotation has it."""
    # region exercise 1.6
    dim = tl.arange(0, block_half)
    row = (slot // page_size * kv_heads + head) * page_size + slot % page_size
    out = row[:, None] * 2 * half + dim
    stored = (slot >= 0)[:, None] & (dim < half)
    if scales is not None:
        dtype: tl.constexpr = side.dtype.element_ty
        scale = scale_of(tl.maximum(peak(first), peak(second)), dtype)
        first, second = scaled(first, scale, dtype), scaled(second, scale, dtype)
        tl.store(scales + row, scale, mask=slot >= 0)
    tl.store(side + out, first, mask=stored)
    tl.store(side + out + half, second, mask=stored)
    # endregion

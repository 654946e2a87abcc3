# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""Store keys or values as they are, or as 8-bit numbers with a scale for each head of each token."""

import torch
import triton
import triton.language as tl

from phase1_kv_pool.kernels.triton.store import store_heads
from phase1_kv_pool.layer import HIGHEST, LOWEST_PEAK

INT8, FLOAT8 = (tl.constexpr(highest) for highest in HIGHEST.values())
LOWEST_BITS = tl.constexpr(int(torch.tensor(LOWEST_PEAK).view(torch.int32)))  # floats above 0 order as their bits do


@triton.jit
def store_scaled(side, scales, row, first, second, half: tl.constexpr):
    """`store_heads`; with scales [pages, kv_heads, page_size], first `quantize` as `phase1_kv_pool.layer` does."""
    if scales is not None:
        dtype: tl.constexpr = side.dtype.element_ty
        highest: tl.constexpr = INT8 if dtype == tl.int8 else FLOAT8
        largest = tl.maximum(tl.maximum(peak(first), peak(second)), LOWEST_BITS).to(tl.float32, bitcast=True)
        scale = tl.div_rn(largest, tl.full(largest.shape, highest, tl.float32))  # the halves of a head share it
        first, second = scaled(first, scale, dtype), scaled(second, scale, dtype)
        tl.store(scales + row, scale, mask=row >= 0)
    store_heads(side, row, first, second, half)


@triton.jit
def peak(x):
    """The bits of the largest magnitude in each row; the bits of NaN and infinity exceed all others."""
    return tl.max(x.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1)


@triton.jit
def scaled(x, scales, dtype: tl.constexpr):
    """Rows as 8-bit numbers."""
    is_finite = scales < float("inf")
    factors = tl.where(is_finite, tl.div_rn(tl.full(scales.shape, 1.0, tl.float32), scales), 0.0)
    numbers = tl.where(is_finite[:, None], x.to(tl.float32), 0.0) * factors[:, None]
    return (tl.floor(numbers + 0.5) if dtype == tl.int8 else numbers).to(dtype)

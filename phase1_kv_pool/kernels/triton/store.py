# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""Store keys and values in pages on a GPU, the simple version: the model stores with phase 2's `rotate_store_kernel`,
which also norms and rotates what it stores."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from phase1_kv_pool.kernels.triton.launch import jit
from phase1_kv_pool.layer import HIGHEST, LOWEST_PEAK, KVLayer

INT8, FLOAT8 = (tl.constexpr(highest) for highest in HIGHEST.values())
LOWEST_BITS = tl.constexpr(int(torch.tensor(LOWEST_PEAK).view(torch.int32)))  # floats above 0 order as their bits do
BYTES = 4096  # of K, and as many of V, per program: two 16-byte accesses for each of 128 threads


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


@jit(do_not_specialize=["tokens"])
def store_kernel(
    keys,
    values,
    key_scales,  # None, unless keys and values are stored in 8 bits
    value_scales,
    slots,
    k,
    v,
    tokens,
    k_token_stride,
    k_head_stride,
    v_token_stride,
    v_head_stride,
    kv_heads: tl.constexpr,
    page_size: tl.constexpr,
    head_dim: tl.constexpr,
    block_dim: tl.constexpr,  # head_dim, rounded up to a power of two
    block_tokens: tl.constexpr,
):
    """Each program writes one head of block_tokens tokens: K and V together, since they have the same slots."""
    # region exercise 1.6
    token = tl.program_id(0).to(tl.int64) * block_tokens + tl.arange(0, block_tokens)
    head = tl.program_id(1)
    dim = tl.arange(0, block_dim)
    slot = tl.load(slots + token, mask=token < tokens, other=-1).to(tl.int64)  # a pool may have more than 2^31 elements
    row = (slot // page_size * kv_heads + head) * page_size + slot % page_size
    offsets = row[:, None] * head_dim + dim[None, :]
    stored = (slot >= 0)[:, None] & (dim < head_dim)[None, :]
    key = tl.load(k + (token * k_token_stride + head * k_head_stride)[:, None] + dim[None, :], mask=stored, other=0.0)
    value = tl.load(v + (token * v_token_stride + head * v_head_stride)[:, None] + dim[None, :], mask=stored, other=0.0)
    if key_scales is not None:
        dtype: tl.constexpr = keys.dtype.element_ty
        key_scale, value_scale = scale_of(peak(key), dtype), scale_of(peak(value), dtype)
        key, value = scaled(key, key_scale, dtype), scaled(value, value_scale, dtype)
        tl.store(key_scales + row, key_scale, mask=slot >= 0)
        tl.store(value_scales + row, value_scale, mask=slot >= 0)
    tl.store(keys + offsets, key, mask=stored)
    tl.store(values + offsets, value, mask=stored)
    # endregion


def constants(kv_heads: int, page_size: int, head_dim: int, itemsize: int) -> dict[str, int]:
    """The constants that the kernel is compiled for: the shape of the pool, and the tokens of a program."""
    block_dim = triton.next_power_of_2(head_dim)
    return {
        "kv_heads": kv_heads,
        "page_size": page_size,
        "head_dim": head_dim,
        "block_dim": block_dim,
        "block_tokens": max(BYTES // (block_dim * itemsize), 1),
    }


def store(kv: KVLayer, slots: Tensor, k: Tensor, v: Tensor) -> None:
    """Store K and V in one launch. Strided views are read in place if the numbers of a head are consecutive."""
    _, kv_heads, page_size, head_dim = kv.keys.shape
    k, v = (side if side.stride(2) == 1 else side.contiguous() for side in (k, v))
    tokens = len(slots)
    if tokens == 0:
        return
    shape = constants(kv_heads, page_size, head_dim, k.element_size())
    grid = (triton.cdiv(tokens, shape["block_tokens"]), kv_heads)
    with torch.cuda.device(kv.keys.get_device()):  # the pool's, not the current one; -1, a CPU, changes nothing
        store_kernel[grid](*kv, slots, k, v, tokens, *k.stride()[:2], *v.stride()[:2], **shape)

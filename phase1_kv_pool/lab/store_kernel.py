# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""A kernel that only stores, with the functions of phase 2's kernel: for tests and for the speed of the store alone."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from phase1_kv_pool.kernels.triton.launch import jit
from phase1_kv_pool.kernels.triton.scaled_store import store_scaled
from phase1_kv_pool.kernels.triton.store import slot_rows
from phase1_kv_pool.layer import KVLayer

BYTES = 4096  # of K, and as many of V, per program: two 16-byte accesses for each of 128 threads


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
    half: tl.constexpr,
    block_half: tl.constexpr,
    block_tokens: tl.constexpr,
):
    """Each program writes one head of block_tokens tokens: K and V together, since they have the same slots."""
    token = tl.program_id(0).to(tl.int64) * block_tokens + tl.arange(0, block_tokens)
    head, dim = tl.program_id(1), tl.arange(0, block_half)
    slot = tl.load(slots + token, mask=token < tokens, other=-1)
    row = slot_rows(slot, head, kv_heads, page_size)
    mask = (slot >= 0)[:, None] & (dim < half)[None, :]
    key = k + (token * k_token_stride + head * k_head_stride)[:, None] + dim[None, :]
    first, second = tl.load(key, mask=mask, other=0.0), tl.load(key + half, mask=mask, other=0.0)
    store_scaled(keys, key_scales, row, first, second, half)
    value = v + (token * v_token_stride + head * v_head_stride)[:, None] + dim[None, :]
    first, second = tl.load(value, mask=mask, other=0.0), tl.load(value + half, mask=mask, other=0.0)
    store_scaled(values, value_scales, row, first, second, half)


def store_on_gpu(kv: KVLayer, slots: Tensor, k: Tensor, v: Tensor) -> None:
    """Store K and V in one launch. Strided views are read in place if the numbers of a head are consecutive."""
    _, kv_heads, page_size, head_dim = kv.keys.shape
    k, v = (side if side.stride(2) == 1 else side.contiguous() for side in (k, v))
    tokens, half = len(slots), head_dim // 2
    if tokens == 0:
        return
    block_half = triton.next_power_of_2(half)
    block_tokens = max(BYTES // (2 * block_half * k.element_size()), 1)
    with torch.cuda.device(kv.keys.get_device()):  # the pool's, not the current one; -1, a CPU, changes nothing
        store_kernel[triton.cdiv(tokens, block_tokens), kv_heads](
            *kv, slots, k, v, tokens, *k.stride()[:2], *v.stride()[:2],
            kv_heads=kv_heads, page_size=page_size, half=half, block_half=block_half, block_tokens=block_tokens,
        )  # fmt: skip

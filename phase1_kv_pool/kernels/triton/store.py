# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""Store keys and values in pages on a GPU, the simple version: the model stores with phase 2's `rotate_store_kernel`,
which also norms and rotates what it stores."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from phase1_kv_pool.kernels.triton.launch import jit

BYTES = 4096  # of K, and as many of V, per program: two 16-byte accesses for each of 128 threads


@jit(do_not_specialize=["tokens"])
def store_kernel(
    keys,
    values,
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
    key = tl.load(k + (token * k_token_stride + head * k_head_stride)[:, None] + dim[None, :], mask=stored)
    value = tl.load(v + (token * v_token_stride + head * v_head_stride)[:, None] + dim[None, :], mask=stored)
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


def store(keys: Tensor, values: Tensor, slots: Tensor, k: Tensor, v: Tensor) -> None:
    """Store K and V in one launch. Strided views are read in place if the numbers of a head are consecutive."""
    _, kv_heads, page_size, head_dim = keys.shape
    k, v = (side if side.stride(2) == 1 else side.contiguous() for side in (k, v))
    tokens = len(slots)
    if tokens == 0:
        return
    shape = constants(kv_heads, page_size, head_dim, keys.element_size())
    grid = (triton.cdiv(tokens, shape["block_tokens"]), kv_heads)
    with torch.cuda.device(keys.get_device()):  # the pool's GPU need not be the current one; -1, a CPU, changes nothing
        store_kernel[grid](keys, values, slots, k, v, tokens, *k.stride()[:2], *v.stride()[:2], **shape)

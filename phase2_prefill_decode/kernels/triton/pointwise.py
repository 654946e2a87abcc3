# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""The operations between the matrix products as Triton kernels: each reads its input once and writes its result once.

They round to the dtype where the references do, and compute in float32 in between.
"""

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from phase1_kv_pool.kernels.triton.launch import jit
from phase1_kv_pool.kernels.triton.scaled_store import store_scaled
from phase1_kv_pool.kernels.triton.store import slot_rows
from phase1_kv_pool.layer import KVLayer

BYTES = 4096  # K or V or q that a program of rotate_store takes; whole heads of one token at least
INNER = 1024  # numbers of a row that a program of swiglu makes


# region add_norm
@jit()
def add_norm_kernel(
    x,  # [tokens, width]
    residual,  # [tokens, width], or None
    weight,  # [width]
    normed,  # [tokens, width]
    total,  # [tokens, width]; not written without a residual
    eps,
    width: tl.constexpr,
    block_width: tl.constexpr,
):
    """Each program computes one token."""
    dim = tl.arange(0, block_width)
    offsets = tl.program_id(0).to(tl.int64) * width + dim
    mask = dim < width
    wide = tl.load(x + offsets, mask=mask, other=0.0).to(tl.float32)
    if residual is not None:
        wide += tl.load(residual + offsets, mask=mask, other=0.0).to(tl.float32)
        rounded = wide.to(total.dtype.element_ty)
        tl.store(total + offsets, rounded, mask=mask)
        wide = rounded.to(tl.float32)  # norm the sum as it is stored
    scaled = (wide * tl.rsqrt(tl.sum(wide * wide) / width + eps)).to(normed.dtype.element_ty)
    scaled = scaled.to(tl.float32) * tl.load(weight + dim, mask=mask, other=0.0).to(tl.float32)
    tl.store(normed + offsets, scaled.to(normed.dtype.element_ty), mask=mask)


# endregion


# region rotate_store
@jit(do_not_specialize=["tokens"], do_not_specialize_on_alignment=["positions", "slots"])
def rotate_store_kernel(
    qkv,  # [tokens, heads + 2 * kv_heads, head_dim], rows `stride` apart
    stride,
    cos,  # [positions, half] float32
    sin,
    positions,
    slots,
    keys,  # [pages, kv_heads, page_size, head_dim]
    values,
    key_scales,  # [pages, kv_heads, page_size], or None
    value_scales,
    q_norm,  # [head_dim], or None
    k_norm,
    query,  # [tokens, heads, head_dim]
    tokens,
    eps,
    heads: tl.constexpr,
    kv_heads: tl.constexpr,
    page_size: tl.constexpr,
    half: tl.constexpr,  # head_dim / 2
    block_half: tl.constexpr,
    block_tokens: tl.constexpr,
):
    """A program takes one head of block_tokens tokens: a head of q, or of k, or of v."""
    token = tl.program_id(0).to(tl.int64) * block_tokens + tl.arange(0, block_tokens)
    head, dim = tl.program_id(1), tl.arange(0, block_half)
    mask = (token < tokens)[:, None] & (dim < half)
    offsets = token[:, None] * stride + head * 2 * half + dim
    first = tl.load(qkv + offsets, mask=mask, other=0.0)
    second = tl.load(qkv + offsets + half, mask=mask, other=0.0)
    if head < heads + kv_heads:  # v is stored as it is
        a, b = first.to(tl.float32), second.to(tl.float32)
        if q_norm is not None:
            norm = q_norm
            if head >= heads:
                norm = k_norm
            scale = tl.rsqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / (2 * half) + eps)[:, None]
            a = weighted(a * scale, tl.load(norm + dim, mask=dim < half, other=0.0))
            b = weighted(b * scale, tl.load(norm + half + dim, mask=dim < half, other=0.0))
        position = tl.load(positions + token, mask=token < tokens, other=0)[:, None]
        c = tl.load(cos + position * half + dim, mask=mask, other=0.0)
        s = tl.load(sin + position * half + dim, mask=mask, other=0.0)
        first, second = (a * c - b * s).to(first.dtype), (b * c + a * s).to(second.dtype)
    slot = tl.load(slots + token, mask=token < tokens, other=-1)
    row = slot_rows(slot, (head - heads) % kv_heads, kv_heads, page_size)
    if head < heads:
        out = (token * heads + head)[:, None] * 2 * half + dim
        tl.store(query + out, first, mask=mask)
        tl.store(query + out + half, second, mask=mask)
    elif head < heads + kv_heads:
        store_scaled(keys, key_scales, row, first, second, half)
    else:
        store_scaled(values, value_scales, row, first, second, half)


@triton.jit
def weighted(x, weight):
    """x * weight, both rounded to the weight's dtype before and after."""
    return (x.to(weight.dtype).to(tl.float32) * weight.to(tl.float32)).to(weight.dtype).to(tl.float32)


# endregion


# region swiglu
@jit()
def swiglu_kernel(
    gate_up,  # [tokens, 2 * inner]
    result,  # [tokens, inner]
    inner: tl.constexpr,
    block_inner: tl.constexpr,
):
    """Each program computes block_inner numbers of one token."""
    token = tl.program_id(0).to(tl.int64)
    dim = tl.program_id(1) * block_inner + tl.arange(0, block_inner)
    gate = tl.load(gate_up + token * 2 * inner + dim, mask=dim < inner, other=0.0)
    up = tl.load(gate_up + token * 2 * inner + inner + dim, mask=dim < inner, other=0.0)
    wide = gate.to(tl.float32)
    small = tl.exp(-tl.abs(wide))  # the form of the sigmoid that cannot overflow, on either side of 0
    gated = (wide * tl.where(wide < 0, small, 1.0) / (1.0 + small)).to(gate.dtype)
    tl.store(result + token * inner + dim, (gated.to(tl.float32) * up.to(tl.float32)).to(gate.dtype), mask=dim < inner)


# endregion


@cache
def add_norm_constants(width: int) -> dict[str, int]:
    return {"width": width, "block_width": triton.next_power_of_2(width)}


@cache
def add_norm_options(width: int) -> dict[str, int]:
    """Sixteen numbers per thread, up to 16 warps."""
    return {"num_warps": min(max(triton.next_power_of_2(width) // 512, 1), 16)}


def add_norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    tokens, width = x.shape
    x = x.contiguous()
    residual = None if residual is None else residual.contiguous()
    normed = torch.empty_like(x)
    total = x if residual is None else torch.empty_like(x)
    if tokens > 0:
        shape = add_norm_constants(width), add_norm_options(width)
        with torch.cuda.device(x.get_device()):
            add_norm_kernel[(tokens,)](x, residual, weight, normed, total, eps, **shape[0], **shape[1])
    return normed, total


@cache
def rotate_store_constants(heads: int, kv_heads: int, page_size: int, head_dim: int, itemsize: int) -> dict[str, Any]:
    block_half = triton.next_power_of_2(head_dim // 2)
    return {
        "heads": heads,
        "kv_heads": kv_heads,
        "page_size": page_size,
        "half": head_dim // 2,
        "block_half": block_half,
        "block_tokens": max(BYTES // (2 * block_half * itemsize), 1),
    }


def rotate_store(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    slots: Tensor,
    kv: KVLayer,
    norms: tuple[Tensor, Tensor] | None,
    eps: float,
) -> Tensor:
    if qkv.stride(1) != 1 or not all(side is None or side.is_contiguous() for side in kv):
        raise ValueError(
            f"the Triton rotate_store takes rows of consecutive numbers and whole layers of a pool, got strides "
            f"{qkv.stride()} of qkv, {kv.keys.stride()} of keys, {kv.values.stride()} of values"
        )
    tokens, (_, kv_heads, page_size, head_dim) = len(qkv), kv.keys.shape
    heads = qkv.shape[1] // head_dim - 2 * kv_heads
    query = qkv.new_empty(tokens, heads, head_dim)
    if tokens > 0:
        shape = rotate_store_constants(heads, kv_heads, page_size, head_dim, qkv.element_size())
        grid = -(-tokens // shape["block_tokens"]), heads + 2 * kv_heads
        norm = norms or (None, None)
        with torch.cuda.device(qkv.get_device()):
            rotate_store_kernel[grid](
                qkv, qkv.stride(0), cos, sin, positions, slots, *kv, *norm, query, tokens, eps, **shape
            )
    return query


def swiglu(gate_up: Tensor) -> Tensor:
    tokens, inner = len(gate_up), gate_up.shape[1] // 2
    result = gate_up.new_empty(tokens, inner)
    if tokens > 0:
        with torch.cuda.device(gate_up.get_device()):
            grid = tokens, -(-inner // INNER)
            swiglu_kernel[grid](gate_up.contiguous(), result, inner=inner, block_inner=INNER)
    return result

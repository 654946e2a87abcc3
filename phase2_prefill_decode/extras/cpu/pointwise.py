# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""The operations between the matrix products on a CPU, rounded where the references round.

The one row of a small decode runs on the calling thread; the rows of a prompt are shared between threads, block by
block. The step in one call, `forward`, has the same functions for a row, so a token has the same numbers in both.
"""

import math
from functools import cache

import numpy as np
import torch
from numba import types
from numba.extending import overload
from numba.np.unsafe.ndarray import to_fixed_tuple
from torch import Tensor

from phase1_kv_pool.layer import HIGHEST, LOWEST_PEAK, KVLayer
from phase2_prefill_decode.extras.cpu.intrinsics import (
    KV_TAGS,
    NO_TENSOR,
    TAGS,
    address,
    array,
    as_bits,
    as_float,
    compiled,
    exp2,
    kernel,
    narrow,
    widen,
)
from phase2_prefill_decode.extras.cpu.openmp import OPENMP, address_of, launch, spread, take, threads_for

BLOCK = 16  # rows
FLOAT32, INT64 = np.dtype(np.float32), np.dtype(np.int64)
LOG2_E = np.float32(math.log2(math.e))
LOWEST_BITS = np.float32(LOWEST_PEAK).view(np.uint32)


@compiled()
def add(x, residual, total):
    for i in range(len(x)):
        total[i] = narrow(widen(x[i]) + widen(residual[i]), total[i])


@compiled()
def norm(x, weight, eps, normed):
    squares = np.float32(0)
    for i in range(len(x)):
        squares += widen(x[i]) * widen(x[i])
    factor = np.float32(1) / np.sqrt(squares / np.float32(len(x)) + eps)
    for i in range(len(x)):
        scaled = narrow(widen(x[i]) * factor, x[i])
        normed[i] = narrow(widen(scaled) * widen(weight[i]), x[i])


def add_norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    x, other = x.contiguous(), NO_TENSOR if residual is None else residual.contiguous().data_ptr()
    total, normed = x if residual is None else torch.empty_like(x), torch.empty_like(x)
    places = x.data_ptr(), other, total.data_ptr(), weight.data_ptr(), normed.data_ptr()
    numbers = *x.shape, int(np.float64(eps).view(np.int64))
    launch(add_norm_body(x.dtype), (*places, *numbers), threads_for(x.numel() / 2e3), OPENMP)
    return normed, total


@cache
def add_norm_body(dtype: torch.dtype) -> int:
    like = TAGS[dtype]

    def body(work):
        _, x, residual, total, weight, normed, tokens, width, eps = to_fixed_tuple(array(work, (9,), INT64), 9)
        has_residual, shape, eps = residual != NO_TENSOR, (tokens, width), np.float32(np.int64(eps).view(np.float64))
        x, residual, weight = array(x, shape, like), array(residual, shape, like), array(weight, (width,), like)
        total, normed = array(total, shape, like), array(normed, shape, like)
        block = take(work)
        while block * BLOCK < tokens:
            for token in range(block * BLOCK, min((block + 1) * BLOCK, tokens)):
                if has_residual:
                    add(x[token], residual[token], total[token])
                norm(total[token], weight, eps, normed[token])
            block = take(work)

    return address_of(body)


# region rotate_store
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
    pages, kv_heads, page_size, head_dim = kv.keys.shape
    tokens, width = qkv.shape
    heads = width // head_dim - 2 * kv_heads
    q = torch.empty((tokens, heads, head_dim), dtype=qkv.dtype)
    rotate_store_kernel(
        rotate_store_body(qkv.dtype, kv.keys.dtype),
        (qkv.data_ptr(), cos.data_ptr(), sin.data_ptr(), positions.data_ptr(), slots.data_ptr()),
        (*map(address, (*kv, *(norms or (None, None)))), q.data_ptr()),
        (tokens, qkv.stride(0), heads, head_dim, cos.shape[0], pages, kv_heads, page_size),
        eps,
        threads_for(tokens * width / 2e3),
        OPENMP,
    )
    return q


@kernel
def rotate_store_kernel(body, inputs, others, sizes, eps, threads, openmp):
    """Check all positions and slots before anything is written."""
    tokens, _, _, _, most_positions, pages, _, page_size = sizes
    check_places(inputs[3], inputs[4], tokens, most_positions, pages * page_size)
    spread(body, np.array((0, *inputs, *others, *sizes, np.float64(eps).view(np.int64))), threads, openmp)


@compiled()
def check_places(positions, slots, tokens, most_positions, most_slots):
    positions, slots = array(positions, (tokens,), INT64), array(slots, (tokens,), INT64)
    for token in range(tokens):
        if positions[token] < 0 or positions[token] >= most_positions:
            raise IndexError("a position is outside of the rotary tables")
        if slots[token] >= most_slots:
            raise IndexError("a slot is outside of the pool")


@cache
def rotate_store_body(dtype: torch.dtype, stored: torch.dtype) -> int:
    like, kv_like = TAGS[dtype], KV_TAGS[stored]

    def body(work):
        (
            _, qkv, cos, sin, positions, slots, keys, values, key_scales, value_scales, q_norm, k_norm, q,
            tokens, stride, heads, head_dim, most_positions, pages, kv_heads, page_size, eps,
        ) = to_fixed_tuple(array(work, (22,), INT64), 22)  # fmt: skip
        half, pool = head_dim // 2, (pages, kv_heads, page_size, head_dim)
        eps = np.float32(np.int64(eps).view(np.float64))
        qkv, q = array(qkv, (tokens, stride), like), array(q, (tokens, heads, head_dim), like)
        cos, sin = array(cos, (most_positions, half), FLOAT32), array(sin, (most_positions, half), FLOAT32)
        positions, slots = array(positions, (tokens,), INT64), array(slots, (tokens,), INT64)
        keys, values = array(keys, pool, kv_like), array(values, pool, kv_like)
        normed, turned = np.empty(head_dim, q.dtype), np.empty(head_dim, q.dtype)
        has_norms = q_norm != NO_TENSOR
        q_norm, k_norm = array(q_norm, (head_dim,), like), array(k_norm, (head_dim,), like)
        block = take(work)
        while block * BLOCK < tokens:
            for token in range(block * BLOCK, min((block + 1) * BLOCK, tokens)):
                row, slot = qkv[token], slots[token]
                angles = cos[positions[token]], sin[positions[token]]
                page, offset = slot // page_size, slot % page_size
                for head in range(heads + kv_heads):
                    x = row[head * head_dim : (head + 1) * head_dim]
                    if has_norms:
                        norm(x, q_norm if head < heads else k_norm, eps, normed)
                        x = normed
                    if head < heads:
                        rotate(x, angles, q[token, head])
                    elif slot >= 0:
                        rotate(x, angles, turned)
                        put(turned, keys, key_scales, page, head - heads, offset)
                if slot >= 0:
                    for head in range(kv_heads):
                        first = (heads + kv_heads + head) * head_dim
                        put(row[first : first + head_dim], values, value_scales, page, head, offset)
            block = take(work)

    return address_of(body)


@compiled(fastmath=False)
def put(x, side, scales, page, head, offset):
    """Store a head of a token. In 8 bits with a scale from its largest number: see `quantize` in
    `phase1_kv_pool.layer`."""
    place, factor = side[page, head, offset], np.float32(1)
    if scales != NO_TENSOR:
        bits = LOWEST_BITS  # floats above 0 order as their bits do, and those that are not finite are above all others
        for i in range(len(x)):
            bits = max(bits, as_bits(widen(x[i])) & np.uint32(0x7FFFFFFF))
        scale = as_float(np.uint32(bits)) / highest(place[0])
        array(scales, side.shape[:3], scale)[page, head, offset] = scale
        if not scale < np.inf:
            place[:] = 0
            return
        factor = np.float32(1) / scale
    for i in range(len(x)):
        place[i] = narrow(widen(x[i]) * factor, place[i])


def highest(like):
    """The largest number of an 8-bit format."""
    raise NotImplementedError("only inside compiled functions")


@overload(highest)
def _highest(like):
    number = np.float32(HIGHEST[torch.int8 if like == types.int8 else torch.float8_e4m3fn])
    return lambda like: number


@compiled()
def rotate(x, angles, turned):
    """Rotate each pair (i, i + half) by its angle."""
    cos, sin = angles
    half = len(cos)
    for i in range(half):
        first, second = widen(x[i]), widen(x[half + i])
        turned[i] = narrow(first * cos[i] - second * sin[i], x[i])
        turned[half + i] = narrow(second * cos[i] + first * sin[i], x[i])


# endregion


def swiglu(gate_up: Tensor) -> Tensor:
    gate_up = gate_up.contiguous()
    tokens, inner = len(gate_up), gate_up.shape[1] // 2
    result = gate_up.new_empty(tokens, inner)
    sizes = gate_up.data_ptr(), result.data_ptr(), tokens, inner
    launch(swiglu_body(gate_up.dtype), sizes, threads_for(tokens * inner / 1e3), OPENMP)
    return result


@cache
def swiglu_body(dtype: torch.dtype) -> int:
    like = TAGS[dtype]

    def body(work):
        _, gate_up, result, tokens, inner = to_fixed_tuple(array(work, (5,), INT64), 5)
        gate_up, result = array(gate_up, (tokens, 2, inner), like), array(result, (tokens, inner), like)
        block = take(work)
        while block * BLOCK < tokens:
            for token in range(block * BLOCK, min((block + 1) * BLOCK, tokens)):
                gate(gate_up[token, 0], gate_up[token, 1], result[token])
            block = take(work)

    return address_of(body)


@compiled()
def gate(opening, up, result):
    """silu(opening) * up."""
    for i in range(len(opening)):
        x = widen(opening[i])
        opened = narrow(x / (np.float32(1) + exp2(-x * LOG2_E)), opening[i])
        result[i] = narrow(widen(opened) * widen(up[i]), opening[i])

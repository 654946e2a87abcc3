# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Attention over pages on a CPU: plans the work of a batch and runs it on all threads.

The structure is that of a GPU kernel. The new tokens of a sequence are cut into tiles; a program computes one tile for
one KV head, with all query heads that share it, so that a key or a value is read from its page once for all rows of the
tile. A sequence with few new tokens is one tile. To use all threads, its context is split between programs (split-KV),
and the partial results are merged at the end, as the program of one tile merges them (`tiles`).
"""

import math
from functools import cache

import numpy as np
import torch
from numba.np.unsafe.ndarray import to_fixed_tuple
from torch import Tensor

from phase1_kv_pool.layer import KVLayer
from phase2_prefill_decode.extras.cpu.intrinsics import (
    KV_TAGS,
    NO_TENSOR,
    TAGS,
    address,
    array,
    compiled,
    exp2,
    kernel,
    narrow,
    widen,
)
from phase2_prefill_decode.extras.cpu.openmp import OPENMP, address_of, spread, take, threads_for
from phase2_prefill_decode.extras.cpu.tiles import SPLIT, TILE, attend_tile, merge, query_tag, room_for, whole, width
from phase2_prefill_decode.kernels.attention import AttentionMetadata, check_shapes

TILE_ROWS = 64  # more only if the group has more heads

LOG2_E = np.float32(math.log2(math.e))
FLOAT32, INT32, INT64 = np.dtype(np.float32), np.dtype(np.int32), np.dtype(np.int64)


def attend(
    query: Tensor, kv: KVLayer, metadata: AttentionMetadata, scale: float, window: int | None, sinks: Tensor | None
) -> Tensor:
    """Compute any ragged batch. The tensors of its metadata are contiguous, as `pack` makes them."""
    check_shapes(query, kv)
    query = query.contiguous()
    result = torch.empty_like(query)
    tokens, heads, head_dim = query.shape
    attend_kernel(
        (query.data_ptr(), *map(address, kv), result.data_ptr(), metadata.page_table.data_ptr(), address(sinks)),
        metadata.cu_seqlens_q.data_ptr(),
        metadata.seq_lens.data_ptr(),
        (tokens, heads, head_dim),
        tuple(kv.keys.shape),
        tuple(metadata.page_table.shape),
        metadata.max_seqlen_k,
        window or metadata.max_seqlen_k + 1,
        scale * math.log2(math.e),  # 2 ** (x log2 e) is e ** x
        TAGS[query.dtype],
        attend_body(query.dtype, kv.keys.dtype),
        threads_for(tokens * heads * head_dim * metadata.max_seqlen_k / 15e3),
        OPENMP,
    )
    return result


@kernel
def attend_kernel(
    addresses, cu_seqlens_q, seq_lens, query_shape, pool_shape, table_shape, max_seqlen_k, window, scale, like, body,
    threads, openmp,
):  # fmt: skip
    """Plan the programs, run them, and combine the splits."""
    sequences, kv_heads, (_, heads, head_dim) = table_shape[0], pool_shape[1], query_shape
    cu_seqlens_q, seq_lens = array(cu_seqlens_q, (sequences + 1,), INT32), array(seq_lens, (sequences,), INT32)
    tiles, splits, split_rows = plan(cu_seqlens_q, seq_lens, max_seqlen_k, window, heads // kv_heads, kv_heads, threads)
    partial = np.empty((splits, split_rows, width(head_dim)), np.float32)
    scratch = np.empty((threads, room_for(max(TILE_ROWS, heads // kv_heads), head_dim)), np.float32)
    own = np.int64(tiles.ctypes.data), len(tiles), np.int64(partial.ctypes.data), splits, split_rows
    work = np.array(
        (0, 0, *addresses, *query_shape, *pool_shape, *table_shape, *own, np.int64(scratch.ctypes.data), window,
         np.float64(scale).view(np.int64))
    )  # fmt: skip
    spread(body, work, threads, openmp)
    if splits > 0:
        combine(tiles, partial, heads // kv_heads, array(addresses[5], query_shape, like), addresses[7])
    return len(scratch)  # keeps it alive until here


# region plan
@compiled()
def plan(cu_seqlens_q, seq_lens, max_seqlen_k, window, group, kv_heads, threads):
    """Return the tiles of a batch, the number of splits among them, and the most rows of a split.

    Memory is read fastest in one piece, and a page has the keys of all KV heads. So a tile of few rows has all KV
    heads, unless that leaves threads without work."""
    units = 0
    for length in seq_lens:
        units += length // SPLIT + 1
    together = kv_heads if units >= 4 * threads else 1
    tiles = np.empty((cu_seqlens_q[len(seq_lens)] + len(seq_lens) * (max_seqlen_k // SPLIT + 2)) * kv_heads, TILE)
    most = max(TILE_ROWS // group, 1)  # tokens in a tile
    count, splits, split_rows = 0, 0, 0
    for sequence in range(len(seq_lens)):
        new = cu_seqlens_q[sequence + 1] - cu_seqlens_q[sequence]
        for done in range(0, new, most):
            tokens, position = min(new - done, most), seq_lens[sequence] - new + done
            first, end = max(position + 1 - window, 0), max(position + tokens, 0)
            is_split = new <= most and end - first > SPLIT
            step = min(max(TILE_ROWS // (tokens * group), 1), together)
            for head in range(0, kv_heads, step):
                begin = first
                while True:
                    tile, stop = tiles[count], min((begin // SPLIT + 1) * SPLIT, end) if is_split else end
                    tile.sequence, tile.first, tile.tokens = sequence, cu_seqlens_q[sequence] + done, tokens
                    tile.head, tile.heads = head, min(step, kv_heads - head)
                    tile.position, tile.begin, tile.end, tile.split = position, begin, stop, -1
                    count, begin = count + 1, stop
                    if is_split:
                        tile.split = splits
                        splits, split_rows = splits + 1, max(split_rows, tile.heads * tokens * group)
                    if begin >= end:
                        break
    return tiles[:count], splits, split_rows


# endregion


@cache
def attend_body(dtype: torch.dtype, stored: torch.dtype) -> int:
    """Compile the body of a thread, for queries in one dtype and keys in another: it runs one program after the other
    until none are left."""
    like, left_like, kv_like = TAGS[dtype], query_tag(dtype, stored), KV_TAGS[stored]

    def body(work):
        (
            _, _, query, keys, values, key_scales, value_scales, result, pages, sinks,
            tokens, heads, head_dim, num_pages, kv_heads, page_size, _, sequences, most_pages,
            tiles, count, partial, splits, split_rows, scratch, window, scale,
        ) = to_fixed_tuple(array(work, (27,), INT64), 27)  # fmt: skip
        batch, pool, group = (tokens, heads, head_dim), (num_pages, kv_heads, page_size, head_dim), heads // kv_heads
        query, result = array(query, batch, like), array(result, batch, like)
        keys, values, scales = array(keys, pool, kv_like), array(values, pool, kv_like), (key_scales, value_scales)
        cached = keys, values, scales, array(pages, (sequences, most_pages), INT32)
        tiles = array(tiles, (count,), TILE)
        partial = array(partial, (splits, split_rows, width(head_dim)), FLOAT32)
        numbers = room_for(max(TILE_ROWS, group), head_dim)
        room = array(scratch + take(work + 8) * numbers * 4, (numbers,), FLOAT32)
        scale = np.float32(np.int64(scale).view(np.float64))
        program = take(work)
        while program < count:
            tile = tiles[program]
            state = attend_tile(tile, query, cached, left_like, window, scale, room)
            if tile.split < 0:
                write(tile, group, state, result, sinks)
            else:
                partial[tile.split, : len(state)] = state
            program = take(work)

    return address_of(body)


@compiled()
def write(tile, group, state, result, sinks):
    """Divide the sums by l_i: the weighted mean of the values. A row without visible keys is zero. A sink is one more
    score, without a value."""
    head_dim, rows = result.shape[2], tile.tokens * group
    dims, sink = whole(head_dim), array(sinks, (result.shape[1],), result[0, 0, 0])
    for row in range(tile.heads * rows):
        token, head = tile.first + row % rows // group, (tile.head + row // rows) * group + row % group
        l_i = state[row, dims + 1]
        if sinks != NO_TENSOR:
            l_i += exp2(widen(sink[head]) * LOG2_E - state[row, dims])
        factor = np.float32(1) / l_i if l_i != 0 else np.float32(0)
        for i in range(head_dim):
            result[token, head, i] = narrow(state[row, i] * factor, result[token, head, i])


# region combine
@compiled()
def combine(tiles, partial, group, result, sinks):
    """Merge the splits of each tile, in order."""
    first = 0
    for number in range(len(tiles)):
        tile = tiles[number]
        if tile.split >= 0:
            if number > 0 and continues(tile, tiles[number - 1]):
                merge(partial[first], partial[tile.split], whole(result.shape[2]))
            else:
                first = tile.split
            if number + 1 == len(tiles) or not continues(tiles[number + 1], tile):
                write(tile, group, partial[first], result, sinks)


@compiled()
def continues(tile, before):
    return tile.first == before.first and tile.head == before.head


# endregion

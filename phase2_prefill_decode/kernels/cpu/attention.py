# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Attention over pages on a CPU: plans the work of a batch and runs it on all threads.

The structure is that of a GPU kernel. The new tokens of a sequence are cut into tiles; a program computes one tile for
one KV head, with all query heads that share it, so that a key or a value is read from its page once for all rows of the
tile. A sequence with few rows is one tile. To use all threads, its context is split between programs (split-KV), and
the partial results are combined at the end.

few     Up to FEW rows (new tokens times the query heads of a group): a decode, a draft, the last token of a prompt.
        Memory-bound: dot products row by row (`decode`).
many    All others: chunks and whole prompts. Compute-bound: matrix products in registers (`prefill`). Rows are padded
        to lines of 16, which pays from half a line on.

Kernel and cuts depend on the sequence alone, so its result does not depend on the rest of the batch.
"""

import math
from functools import cache

import numpy as np
import torch
from numba.np.unsafe.ndarray import to_fixed_tuple
from torch import Tensor

from phase2_prefill_decode.kernels.attention import AttentionMetadata, check_shapes
from phase2_prefill_decode.kernels.cpu.decode import FEW, attend_few, room_for_few
from phase2_prefill_decode.kernels.cpu.intrinsics import TAGS, array, compiled, exp2, kernel, narrow
from phase2_prefill_decode.kernels.cpu.openmp import OPENMP, on_each_thread, spread, take, threads_for
from phase2_prefill_decode.kernels.cpu.prefill import ROWS, attend_many, room_for_many
from phase2_prefill_decode.kernels.cpu.tiles import LOWEST, TILE, width

SPLIT = 512  # keys of one program, where a sequence is split

FLOAT32, INT32, INT64 = np.dtype(np.float32), np.dtype(np.int32), np.dtype(np.int64)


def attend(
    query: Tensor, keys: Tensor, values: Tensor, metadata: AttentionMetadata, scale: float, window: int | None = None
) -> Tensor:
    """Compute any ragged batch. The tensors of its metadata are contiguous, as `pack` makes them."""
    check_shapes(query, keys, values)
    query = query.contiguous()
    result = torch.empty_like(query)
    tokens, heads, head_dim = query.shape
    attend_kernel(
        (query.data_ptr(), keys.data_ptr(), values.data_ptr(), result.data_ptr(), metadata.page_table.data_ptr()),
        metadata.cu_seqlens_q.data_ptr(),
        metadata.seq_lens.data_ptr(),
        (tokens, heads, head_dim),
        tuple(keys.shape),
        tuple(metadata.page_table.shape),
        metadata.max_seqlen_k,
        window or metadata.max_seqlen_k + 1,
        scale * math.log2(math.e),  # 2 ** (x log2 e) is e ** x
        TAGS[query.dtype],
        attend_body(query.dtype),
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
    tiles, splits, split_rows = plan(cu_seqlens_q, seq_lens, max_seqlen_k, window, heads // kv_heads)
    partial = np.empty((splits, kv_heads, split_rows, width(head_dim)), np.float32)
    scratch = np.empty((threads, room_of(heads // kv_heads, head_dim)), np.float32)
    own = np.int64(tiles.ctypes.data), len(tiles), np.int64(partial.ctypes.data), splits, split_rows
    work = np.array(
        (0, 0, *addresses, *query_shape, *pool_shape, *table_shape, *own, np.int64(scratch.ctypes.data), window,
         np.float64(scale).view(np.int64))
    )  # fmt: skip
    spread(body, work, threads, openmp)
    if splits > 0:
        combine(tiles, partial, array(addresses[3], query_shape, like))
    return len(scratch)  # keeps it alive until here


# region plan
@compiled()
def plan(cu_seqlens_q, seq_lens, max_seqlen_k, window, group):
    """Return the tiles of a batch, the number of splits among them, and the most rows of a split."""
    tiles = np.empty(cu_seqlens_q[len(seq_lens)] + len(seq_lens) * (max_seqlen_k // SPLIT + 1), TILE)
    most = max(ROWS // group, 1)  # tokens in a tile
    count, splits, split_rows = 0, 0, 0
    for sequence in range(len(seq_lens)):
        new = cu_seqlens_q[sequence + 1] - cu_seqlens_q[sequence]
        for done in range(0, new, most):
            tokens, position = min(new - done, most), seq_lens[sequence] - new + done
            begin, end = max(position + 1 - window, 0), max(position + tokens, 0)
            is_split = new <= most and end - begin > SPLIT
            step = SPLIT if is_split else max(end - begin, 1)
            for start in range(begin, max(end, begin + 1), step):
                tile = tiles[count]
                tile.sequence, tile.first, tile.tokens = sequence, cu_seqlens_q[sequence] + done, tokens
                tile.position, tile.begin, tile.end, tile.split = position, start, min(start + step, end), -1
                tile.is_long = new * group > FEW
                count += 1
                if is_split:
                    tile.split = splits
                    splits, split_rows = splits + 1, max(split_rows, tokens * group)
    return tiles[:count], splits, split_rows


# endregion


@compiled()
def room_of(group, head_dim):
    """The float32 of scratch memory per thread, in whole lines of results and with room for alignment."""
    most = max(room_for_few(head_dim), room_for_many(group, head_dim))
    return (-(-most // width(head_dim)) + 1) * width(head_dim)


@cache
def attend_body(dtype: torch.dtype) -> int:
    """Compile the body of a thread: it runs one program after the other until none are left."""
    like = TAGS[dtype]

    def body(work):
        (
            _, _, query, keys, values, result, pages,
            tokens, heads, head_dim, num_pages, kv_heads, page_size, _, sequences, most_pages,
            tiles, count, partial, splits, split_rows, scratch, window, scale,
        ) = to_fixed_tuple(array(work, (24,), INT64), 24)  # fmt: skip
        batch, pool, group = (tokens, heads, head_dim), (num_pages, kv_heads, page_size, head_dim), heads // kv_heads
        query, result = array(query, batch, like), array(result, batch, like)
        cached = array(keys, pool, like), array(values, pool, like), array(pages, (sequences, most_pages), INT32)
        tiles = array(tiles, (count,), TILE)
        partial = array(partial, (splits, kv_heads, split_rows, width(head_dim)), FLOAT32)
        thread, numbers = take(work + 8), room_of(group, head_dim)
        room = array((scratch + thread * numbers * 4 + 63) // 64 * 64, (numbers - width(head_dim),), FLOAT32)
        scale = np.float32(np.int64(scale).view(np.float64))
        program = take(work)
        while program < count * kv_heads:
            tile, head = tiles[program // kv_heads], program % kv_heads
            if tile.is_long:
                state = attend_many(tile, head, query, cached, window, scale, room)
            else:
                state = attend_few(tile, head, query, cached, window, scale, room)
            if tile.split < 0:
                write(tile, head, group, state, result)
            else:
                keep(state[: tile.tokens * group], partial[tile.split, head])
            program = take(work)

    return on_each_thread(body)


@compiled()
def keep(state, partial):
    for row in range(state.shape[0]):
        for i in range(state.shape[1]):
            partial[row, i] = state[row, i]


@compiled()
def write(tile, head, group, state, result):
    """Divide the sums by l_i: the weighted mean of the values. A row without visible keys is zero."""
    head_dim = result.shape[2]
    for row in range(tile.tokens * group):
        mean = result[tile.first + row // group, head * group + row % group]
        l_i = state[row, head_dim + 1]
        factor = np.float32(1) / l_i if l_i != 0 else np.float32(0)
        for i in range(head_dim):
            mean[i] = narrow(state[row, i] * factor, mean[i])


# region combine
@compiled()
def combine(tiles, partial, result):
    """Join the splits of each tile: rescale them to the largest m_i and add them up."""
    kv_heads, head_dim = partial.shape[1], result.shape[2]
    group = result.shape[1] // kv_heads
    for number in range(len(tiles)):
        tile = tiles[number]
        if tile.split < 0 or (number > 0 and tiles[number - 1].first == tile.first):
            continue  # not split, or not the first split
        behind = number + 1
        while behind < len(tiles) and tiles[behind].first == tile.first:
            behind += 1
        parts = partial[tile.split : tile.split + behind - number]
        for head in range(kv_heads):
            for row in range(tile.tokens * group):
                merge(parts[:, head, row], head_dim)
            write(tile, head, group, parts[0, head], result)


@compiled()
def merge(parts, head_dim):
    """Join the splits of one row into the first."""
    m_i = LOWEST
    for part in parts:
        m_i = max(m_i, part[head_dim])
    first = parts[0]
    alpha = exp2(first[head_dim] - m_i)
    for i in range(head_dim + 2):
        first[i] *= alpha
    for part in parts[1:]:
        alpha = exp2(part[head_dim] - m_i)
        for i in range(head_dim):
            first[i] += part[i] * alpha
        first[head_dim + 1] += part[head_dim + 1] * alpha


# endregion

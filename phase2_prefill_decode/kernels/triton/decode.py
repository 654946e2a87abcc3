# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""Decode attention: few new tokens, many keys. Each sequence is split between programs (split-KV, as in FlashDecoding).

A decode reads every key and value once and does little arithmetic with them: it is memory-bound. One program for each
sequence and KV head would leave most of a GPU idle, so a sequence is cut into splits of `chunk` tokens and a second
kernel joins their results. The query heads of a group are rows of one tile: what is loaded for one head serves all.

The cuts depend only on the sequence's own length, so its result is the same to the last bit in any batch. Grids are
made from host integers that are upper bounds: a program without work returns at once. So a captured launch (a CUDA
graph) serves any batch of no more sequences, each of no more than `max_seqlen_k` tokens.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from phase2_prefill_decode.kernels.attention import AttentionMetadata
from phase2_prefill_decode.kernels.triton.tiles import (
    LOG2_E,
    LOWEST,
    PRECISION,
    Tiling,
    accumulate,
    block,
    lookup_pages,
)

CHUNK = 512  # tokens of a split: enough to amortise the start and the join, few enough to make many splits
SPLITS = 16  # that join_kernel loads at once


# region decode
@triton.jit(
    do_not_specialize=["table_width", "max_splits"],
    # Views of one buffer, at any offset.
    do_not_specialize_on_alignment=["cu_seqlens_q", "seq_lens", "page_table", "work"],
)
def decode_kernel(
    query,  # [tokens, heads, head_dim]
    keys,  # [pages, kv_heads, page_size, head_dim]
    values,
    result,  # [tokens, heads, head_dim]
    parts,  # [splits of all sequences, queries, heads, head_dim] float32: the result of each split
    lse,  # [splits of all sequences, queries, heads] float32: log2 of the sum of the split's weights (log-sum-exp)
    firsts,  # [sequences]: the index of each sequence's first split; written here, read by the join
    cu_seqlens_q,  # [sequences + 1]
    seq_lens,  # [sequences]
    page_table,  # [sequences, table_width]
    work,  # [programs, 2]: the sequence and the split of each program; None: a program for every pair
    table_width,
    max_splits,
    scale,  # times log2(e)
    kv_heads: tl.constexpr,
    group: tl.constexpr,  # query heads per KV head
    head_dim: tl.constexpr,
    block_dim: tl.constexpr,  # head_dim, rounded up to a power of two
    page_size: tl.constexpr,
    queries: tl.constexpr,  # at most so many new tokens; sequences with more are skipped
    rows: tl.constexpr,  # queries * group, rounded up to a tensor-core tile
    tile: tl.constexpr,  # tokens loaded at once
    chunk: tl.constexpr,
    window: tl.constexpr,
):
    """Each program computes one split of one sequence, for one group of heads."""
    sequence, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    number = sequence * max_splits + split  # index of the split among all
    if work is not None:
        number = sequence
        sequence, split = tl.load(work + 2 * sequence), tl.load(work + 2 * sequence + 1)
    start = tl.load(cu_seqlens_q + sequence)
    new = tl.load(cu_seqlens_q + sequence + 1) - start
    length = tl.load(seq_lens + sequence)
    begin, splits = cuts(length, new, chunk, window)
    if (new > queries) | (split >= splits):
        return

    row, dim = tl.arange(0, rows), tl.arange(0, block_dim)
    position = length - new + row // group  # of each row's token in its sequence
    q_offsets = row // group * kv_heads * group + kv_head * group + row % group  # from the sequence's first row
    q_mask = (row < new * group)[:, None] & (dim < head_dim)
    first_row = start.to(tl.int64) * kv_heads * group
    q = tl.load(query + (first_row + q_offsets)[:, None] * head_dim + dim, mask=q_mask, other=0.0)

    begin += split * chunk
    end = tl.minimum(begin + chunk, length)
    if window is not None:  # skip tiles before the windows of all rows
        begin = tl.maximum(begin, (length - new - window + 1) // tile * tile)
    table = page_table + sequence.to(tl.int64) * table_width
    page = lookup_pages(table, begin, length, page_size, tile)
    m_i = tl.full([rows], LOWEST, tl.float32)
    l_i = tl.zeros([rows], tl.float32)
    acc = tl.zeros([rows, block_dim], tl.float32)
    for first in range(begin, end, tile):
        # region exercise 2.7
        token = first + tl.arange(0, tile)
        kv_offsets = ((page * kv_heads + kv_head) * page_size + token % page_size)[:, None] * head_dim + dim
        kv_mask = (token < length)[:, None] & (dim < head_dim)
        key = tl.load(keys + kv_offsets, mask=kv_mask, other=0.0)
        value = tl.load(values + kv_offsets, mask=kv_mask, other=0.0)  # 0: a weight of 0 times NaN would be NaN
        page = lookup_pages(table, first + tile, length, page_size, tile)  # of the next tile, while this one loads
        seen = token <= position[:, None]
        if window is not None:
            seen &= token > position[:, None] - window
        scores = tl.dot(q, tl.trans(key), input_precision=PRECISION) * scale
        m_i, l_i, acc = accumulate(tl.where(seen, scores, -float("inf")), value, m_i, l_i, acc)
        # endregion

    acc /= tl.where(l_i == 0, 1.0, l_i)[:, None]  # a row without visible keys is 0
    if splits == 1:  # nothing to join
        out = (first_row + q_offsets)[:, None] * head_dim + dim
        tl.store(result + out, acc.to(result.dtype.element_ty), mask=q_mask)
    else:
        if split == 0:
            tl.store(firsts + sequence, number)
        part = number.to(tl.int64) * queries * kv_heads * group + q_offsets
        tl.store(parts + part[:, None] * head_dim + dim, acc, mask=q_mask)
        tl.store(lse + part, m_i + tl.log2(l_i), mask=row < new * group)


# endregion


@triton.jit
def cuts(length, new, chunk: tl.constexpr, window: tl.constexpr):
    """Where the first split begins, and the number of splits. Splits begin at multiples of chunk, window or not."""
    origin = 0
    if window is not None:
        origin = tl.maximum(length - new - window + 1, 0) // chunk * chunk
    return origin, tl.maximum(tl.cdiv(length - origin, chunk), 1)


# region join
@triton.jit(do_not_specialize_on_alignment=["cu_seqlens_q", "seq_lens"])
def join_kernel(
    result,
    parts,
    lse,
    firsts,
    cu_seqlens_q,
    seq_lens,
    heads: tl.constexpr,
    head_dim: tl.constexpr,
    block_dim: tl.constexpr,
    queries: tl.constexpr,
    at_once: tl.constexpr,  # splits loaded at once
    chunk: tl.constexpr,
    window: tl.constexpr,
):
    """Each program joins the splits of one head of one new token: their mean, each weighted by its sum."""
    sequence, query, head = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    start = tl.load(cu_seqlens_q + sequence)
    new = tl.load(cu_seqlens_q + sequence + 1) - start
    _, splits = cuts(tl.load(seq_lens + sequence), new, chunk, window)
    if (new > queries) | (query >= new) | (splits == 1):
        return

    dim = tl.arange(0, block_dim)
    row = (tl.load(firsts + sequence).to(tl.int64) * queries + query) * heads + head  # of the first split
    m_i = tl.full([], LOWEST, tl.float32)
    l_i = tl.zeros([], tl.float32)
    acc = tl.zeros([block_dim], tl.float32)
    for first in range(0, splits, at_once):
        split = first + tl.arange(0, at_once)
        is_part = (split < splits)[:, None] & (dim < head_dim)
        offsets = row + split * queries * heads
        lse_j = tl.load(lse + offsets, mask=split < splits, other=-float("inf"))
        part = tl.load(parts + offsets[:, None] * head_dim + dim, mask=is_part, other=0.0)
        # region exercise 2.4
        m_new = tl.maximum(m_i, tl.max(lse_j, 0))
        alpha = tl.exp2(m_i - m_new)  # rescales what was summed relative to the lower maximum
        p = tl.exp2(lse_j - m_new)
        l_i = l_i * alpha + tl.sum(p, 0)
        acc = acc * alpha + tl.sum(p[:, None] * part, 0)
        m_i = m_new
        # endregion
    out = ((start + query).to(tl.int64) * heads + head) * head_dim + dim
    tl.store(result + out, (acc / l_i).to(result.dtype.element_ty), mask=dim < head_dim)


# endregion


def tiling(head_dim: int, itemsize: int, rows: int) -> Tiling:
    """The tiling for `rows` used rows."""
    wide = head_dim > 128
    if itemsize == 4:  # float32 products take more registers and no tensor cores
        return Tiling(block(rows), 16 if wide else 32, 8, 3, maxnreg=255)
    tile = 32 if wide else 64
    if block(rows) * block(head_dim) > 64 * 128:  # more registers than four warps have
        return Tiling(block(rows), tile, 8, 2 if wide else 3)
    return Tiling(block(rows), tile, 4, 3)


def constants(head_dim: int, queries: int, chunk: int, window: int | None) -> dict[str, int | None]:
    """The constants that both kernels are compiled for."""
    return {
        "head_dim": head_dim,
        "block_dim": block(head_dim),
        "queries": queries,
        "chunk": chunk,
        "window": window,
    }


def decode_constants(heads: int, kv_heads: int, page_size: int, tiles: Tiling) -> dict[str, int]:
    """The constants that only decode_kernel is compiled for."""
    return {
        "kv_heads": kv_heads,
        "group": heads // kv_heads,
        "page_size": page_size,
        "rows": tiles.rows,
        "tile": tiles.tile,
    }


def decode(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    result: Tensor,
    metadata: AttentionMetadata,
    scale: float,
    window: int | None = None,
    *,
    chunk: int = CHUNK,
    work: Tensor | None = None,
) -> None:
    """Compute the sequences with at most `metadata.max_seqlen_q` new tokens; rows of others are left unchanged.

    None of these sequences has more than `metadata.max_seqlen_k` tokens. `chunk` is a multiple of 128. `work` lists
    every split of every such sequence; without it, the grid has the longest sequence's number of splits for each.
    """
    if chunk < 128 or chunk % 128:
        raise ValueError(f"chunk must be a multiple of 128 tokens, got {chunk}")
    heads, (_, kv_heads, page_size, head_dim) = query.shape[1], keys.shape
    sequences, queries = len(metadata.seq_lens), max(metadata.max_seqlen_q, 1)
    seen = metadata.max_seqlen_k if window is None else min(metadata.max_seqlen_k, window + queries + chunk - 2)
    max_splits = max(triton.cdiv(seen, chunk), 1)
    splits = sequences * max_splits if work is None else len(work)
    lse = query.new_empty((splits, queries, heads), dtype=torch.float32)
    parts = query.new_empty((*lse.shape, head_dim), dtype=torch.float32)
    firsts = query.new_empty(sequences, dtype=torch.int32)
    tiles = tiling(head_dim, keys.element_size(), queries * heads // kv_heads)
    both = constants(head_dim, queries, chunk, window)
    grid = (sequences, kv_heads, max_splits) if work is None else (len(work), kv_heads)
    with torch.cuda.device(query.get_device()):
        decode_kernel[grid](
            query,
            keys,
            values,
            result,
            parts,
            lse,
            firsts,
            metadata.cu_seqlens_q,
            metadata.seq_lens,
            metadata.page_table,
            work,
            metadata.page_table.stride(0),
            max_splits,
            scale * LOG2_E,
            **decode_constants(heads, kv_heads, page_size, tiles),
            **both,
            **tiles.options,
        )
        if max_splits > 1:
            batch = metadata.cu_seqlens_q, metadata.seq_lens
            join_kernel[sequences, queries, heads](
                result, parts, lse, firsts, *batch, heads=heads, at_once=SPLITS, **both
            )

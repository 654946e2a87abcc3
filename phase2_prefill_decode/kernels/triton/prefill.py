# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""Prefill attention, the simple version: the server runs phase 3's ragged kernel, `ragged.py`, which is this one with a
table of blocks.

Each program takes a block of a sequence's new tokens, with all heads of a group, and walks once over the keys that any
of them sees. What it loads serves up to 128 rows, which keeps the tensor cores busy: prefill is compute-bound. There
is no need to split the keys, because a prompt has enough blocks.

New tokens may follow tokens that are already in pages, so the kernel takes any ragged batch, decodes too, if not at
full speed. The grid has as many blocks for each sequence as the longest query needs; a program without a block returns
at once. That costs little for prompts of similar lengths. Phase 3 does better for one long chunk among decodes.
"""

from functools import cache

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


# region prefill
@triton.jit(
    do_not_specialize=["table_width"],
    do_not_specialize_on_alignment=["cu_seqlens_q", "seq_lens", "page_table"],  # views of one buffer, at any offset
)
def prefill_kernel(
    query,  # [tokens, heads, head_dim]
    keys,  # [pages, kv_heads, page_size, head_dim]
    values,
    result,  # [tokens, heads, head_dim]
    cu_seqlens_q,  # [sequences + 1]
    seq_lens,  # [sequences]
    page_table,  # [sequences, table_width]
    table_width,
    scale,  # times log2(e)
    kv_heads: tl.constexpr,
    group: tl.constexpr,  # query heads per KV head
    head_dim: tl.constexpr,
    block_dim: tl.constexpr,  # head_dim, rounded up to a power of two
    page_size: tl.constexpr,
    rows: tl.constexpr,  # of a block: new tokens * group
    tile: tl.constexpr,  # tokens loaded at once
    window: tl.constexpr,
):
    """Each program computes one block of new tokens of one sequence, for one group of heads."""
    sequence, kv_head = tl.program_id(1), tl.program_id(2)
    start = tl.load(cu_seqlens_q + sequence)
    new = tl.load(cu_seqlens_q + sequence + 1) - start
    length = tl.load(seq_lens + sequence)
    tokens: tl.constexpr = rows // group  # of a block; unless group is a power of two, some rows stay unused
    before = tl.program_id(0) * tokens
    if before >= new:
        return

    row, dim = tl.arange(0, rows), tl.arange(0, block_dim)
    mine = before + row // group  # the new token of each row
    position = length - new + mine  # of that token in its sequence
    q_offsets = (start + mine).to(tl.int64) * kv_heads * group + kv_head * group + row % group
    q_mask = ((row < tokens * group) & (mine < new))[:, None] & (dim < head_dim)
    q = tl.load(query + q_offsets[:, None] * head_dim + dim, mask=q_mask, other=0.0)
    table = page_table + sequence.to(tl.int64) * table_width
    begin, end = 0, length - new + tl.minimum(before + tokens, new)  # the last row sees the most keys
    if window is not None:  # the first row's window begins first
        begin = tl.maximum(length - new + before - window + 1, 0) // tile * tile
    m_i = tl.full([rows], LOWEST, tl.float32)
    l_i = tl.zeros([rows], tl.float32)
    acc = tl.zeros([rows, block_dim], tl.float32)
    page = lookup_pages(table, begin, length, page_size, tile)
    for first in range(begin, end, tile):
        token = first + tl.arange(0, tile)
        kv_offsets = ((page * kv_heads + kv_head) * page_size + token % page_size)[:, None] * head_dim + dim
        kv_mask = (token < length)[:, None] & (dim < head_dim)
        key = tl.load(keys + kv_offsets, mask=kv_mask, other=0.0)
        value = tl.load(values + kv_offsets, mask=kv_mask, other=0.0)
        page = lookup_pages(table, first + tile, length, page_size, tile)
        seen = token <= position[:, None]
        if window is not None:
            seen &= token > position[:, None] - window
        scores = tl.dot(q, tl.trans(key), input_precision=PRECISION) * scale
        m_i, l_i, acc = accumulate(tl.where(seen, scores, -float("inf")), value, m_i, l_i, acc)
    acc /= tl.where(l_i == 0, 1.0, l_i)[:, None]
    tl.store(result + q_offsets[:, None] * head_dim + dim, acc.to(result.dtype.element_ty), mask=q_mask)


# endregion


@cache
def tiling(head_dim: int, itemsize: int, group: int) -> Tiling:
    """The tiling of a block, with rows for at least one new token."""
    if itemsize == 4:  # float32 products take more registers and no tensor cores
        tiles = Tiling(32 if head_dim <= 128 else 16, 16, 8, 2, maxnreg=255)
    elif head_dim <= 64:
        tiles = Tiling(64, 64, 4, 3, maxnreg=255)
    else:
        tiles = Tiling(128, 64, 8, 3) if head_dim <= 128 else Tiling(64, 32, 8, 2)
    return tiles._replace(rows=max(tiles.rows, block(group)))


@cache
def constants(
    heads: int, kv_heads: int, page_size: int, head_dim: int, tiles: Tiling, window: int | None
) -> dict[str, int | None]:
    """The constants that the kernel is compiled for."""
    return {
        "kv_heads": kv_heads,
        "group": heads // kv_heads,
        "head_dim": head_dim,
        "block_dim": block(head_dim),
        "page_size": page_size,
        "rows": tiles.rows,
        "tile": tiles.tile,
        "window": window,
    }


def prefill(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    result: Tensor,
    metadata: AttentionMetadata,
    scale: float,
    window: int | None = None,
) -> None:
    """Compute all sequences of a ragged batch."""
    heads, (_, kv_heads, page_size, head_dim) = query.shape[1], keys.shape
    group = heads // kv_heads
    tiles = tiling(head_dim, keys.element_size(), group)
    blocks = triton.cdiv(metadata.max_seqlen_q, tiles.rows // group)
    with torch.cuda.device(query.get_device()):
        prefill_kernel[blocks, len(metadata.seq_lens), kv_heads](
            query,
            keys,
            values,
            result,
            metadata.cu_seqlens_q,
            metadata.seq_lens,
            metadata.page_table,
            metadata.page_table.stride(0),
            scale * LOG2_E,
            **constants(heads, kv_heads, page_size, head_dim, tiles, window),
            **tiles.options,
        )

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""Prefill attention: the kernel for prompts and for chunks of prompts.

A program takes a block of a sequence's new tokens, with all heads of a group, and walks once over the keys that any of
them sees. Each load serves up to 128 rows, which keeps the tensor cores busy: prefill is compute-bound. There is no
need to split the keys, because a prompt has enough blocks. `plan` lists the blocks.

Nearly all keys of a chunk after a long context precede all of its queries. These tiles need no mask, neither causal
nor for the length. Masks remain for the diagonal, and for windows, which are short.
"""

from functools import cache

import triton.language as tl

from phase1_kv_pool.kernels.triton.launch import jit
from phase2_prefill_decode.kernels.triton.tiles import LOG2_E, LOWEST, Tiling, block, walk


# region exercise 2.19
@jit(
    do_not_specialize=["table_width"],
    do_not_specialize_on_alignment=["cu_seqlens_q", "seq_lens", "page_table", "blocks", "sinks"],  # views at any offset
)
def prefill_kernel(
    query,  # [tokens, heads, head_dim]
    keys,  # [pages, kv_heads, page_size, head_dim]
    values,
    key_scales,  # [pages, kv_heads, page_size], or None
    value_scales,
    sinks,  # [heads], or None
    result,  # [tokens, heads, head_dim]
    cu_seqlens_q,
    seq_lens,
    page_table,
    blocks,  # [blocks, 2]: a sequence, and the first new token of the block
    table_width,
    scale,  # times log2(e)
    kv_heads: tl.constexpr,
    group: tl.constexpr,
    head_dim: tl.constexpr,
    block_dim: tl.constexpr,
    page_size: tl.constexpr,
    rows: tl.constexpr,
    tile: tl.constexpr,
    window: tl.constexpr,
):
    """Each program computes one block of new tokens, for one group of heads.

    the sequence   |-- length - new known tokens --|-------------- new tokens --------------|
    the block                                      |-- before --|-- tokens --|
    row r                                          |---- mine ----|              is of group head r % group
                   |----------------- position ------------------|              and sees the keys 0 to position
    """
    kv_head, number = tl.program_id(0), tl.program_id(1)
    sequence, before = tl.load(blocks + 2 * number), tl.load(blocks + 2 * number + 1)
    start = tl.load(cu_seqlens_q + sequence)
    new = tl.load(cu_seqlens_q + sequence + 1) - start
    length = tl.load(seq_lens + sequence)
    tokens: tl.constexpr = rows // group  # in a block; unless group is a power of two, some rows stay unused

    row, dim = tl.arange(0, rows), tl.arange(0, block_dim)
    mine = before + row // group  # the new token of each row
    position = length - new + mine  # where that token is in its sequence
    q_offsets = (start + mine).to(tl.int64) * kv_heads * group + kv_head * group + row % group
    q_mask = ((row < tokens * group) & (mine < new))[:, None] & (dim < head_dim)
    q = tl.load(query + q_offsets[:, None] * head_dim + dim, mask=q_mask, other=0.0)
    kv, table = (keys, values, key_scales, value_scales), page_table + sequence.to(tl.int64) * table_width
    shape: tl.constexpr = (kv_heads, page_size, head_dim)
    m_i = tl.full([rows], LOWEST, tl.float32)
    l_i = tl.zeros([rows], tl.float32)
    acc = tl.zeros([rows, block_dim], tl.float32)
    if sinks is not None:  # start at a score without a value
        m_i, l_i = tl.load(sinks + kv_head * group + row % group).to(tl.float32) * LOG2_E, l_i + 1

    first, last = length - new + before, length - new + tl.minimum(before + tokens, new) - 1  # positions of the block
    if window is None:
        begin = (first + 1) // tile * tile  # tiles before `begin` precede all rows
        m_i, l_i, acc = walk(
            0, begin, q, position, (m_i, l_i, acc), kv, table, length, scale, kv_head, shape, tile, window, False
        )
    else:
        begin = tl.maximum(first - window + 1, 0) // tile * tile
    m_i, l_i, acc = walk(
        begin, last + 1, q, position, (m_i, l_i, acc), kv, table, length, scale, kv_head, shape, tile, window, True
    )
    acc /= tl.where(l_i == 0, 1.0, l_i)[:, None]
    tl.store(result + q_offsets[:, None] * head_dim + dim, acc.to(result.dtype.element_ty), mask=q_mask)


# endregion


@cache
def tiling(head_dim: int, itemsize: int, group: int, in_8_bits: bool = False) -> Tiling:
    """The tiling of a block, with rows for at least one new token. `itemsize` is the queries'; keys and values in
    8 bits take more registers: they are widened."""
    if itemsize == 4:  # float32 products take more registers and no tensor cores
        tiles = Tiling(32 if head_dim <= 128 else 16, 16, 8, 1 if in_8_bits else 2, maxnreg=255)
    elif head_dim <= 64:
        tiles = Tiling(64, 64, 4, 3, maxnreg=255)
    elif head_dim <= 128:
        tiles = Tiling(64 if in_8_bits else 128, 64, 8, 3)
    else:
        tiles = Tiling(64, 32, 8, 2)
    return tiles._replace(rows=max(tiles.rows, block(group)))

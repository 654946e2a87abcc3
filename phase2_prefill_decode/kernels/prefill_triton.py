# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""Attention for prefills: many new tokens, which share the keys they read.

A program takes a block of a sequence's new tokens, with all heads of a group, and walks once over the keys that any of
them sees. What it reads serves up to 128 rows, and the tensor cores have enough to do: that is the whole difference
from a decode, whose few rows share nothing with anyone. There is nothing to split, for a prompt has blocks enough.

New tokens may stand behind others that are in pages already, so every ragged batch is served, decodes too, if not
fast. The grid has a block for every sequence wherever the one with the most new tokens has one; a program without a
block ends at once. That is nothing for prompts of like lengths. Phase 3 does better for one long chunk among decodes.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from phase2_prefill_decode.kernels.attention import Ragged
from phase2_prefill_decode.kernels.tiles_triton import LEAST, LOG2_E, PRECISION, Tiling, accumulate, block, look_up


# region prefill
@triton.jit(
    do_not_specialize=["table_width"],
    do_not_specialize_on_alignment=["starts", "lengths", "pages"],  # parts of one buffer, wherever in it they begin
)
def prefill_kernel(
    query,  # [tokens, heads, head_dim]
    keys,  # [pages, kv_heads, page_size, head_dim]
    values,
    result,  # [tokens, heads, head_dim]
    starts,
    lengths,
    pages,
    table_width,
    scale,  # times log2(e)
    kv_heads: tl.constexpr,
    group: tl.constexpr,  # query heads for each of them
    head_dim: tl.constexpr,
    block_dim: tl.constexpr,  # head_dim, up to a power of two
    page_size: tl.constexpr,
    rows: tl.constexpr,  # of a block: new tokens * group
    tile: tl.constexpr,  # tokens read at once
    window: tl.constexpr,
):
    """A program is one block of new tokens of one sequence, for one group of heads."""
    sequence, kv_head = tl.program_id(1), tl.program_id(2)
    start = tl.load(starts + sequence)
    new = tl.load(starts + sequence + 1) - start
    length = tl.load(lengths + sequence)
    tokens: tl.constexpr = rows // group  # of a block; where group is no power of two, some rows are left over
    before = tl.program_id(0) * tokens
    if before >= new:
        return

    row, dim = tl.arange(0, rows), tl.arange(0, block_dim)
    mine = before + row // group  # the new token of each row
    position = length - new + mine  # in its sequence
    here = (start + mine).to(tl.int64) * kv_heads * group + kv_head * group + row % group
    is_here = ((row < tokens * group) & (mine < new))[:, None] & (dim < head_dim)
    q = tl.load(query + here[:, None] * head_dim + dim, mask=is_here, other=0.0)
    table = pages + sequence.to(tl.int64) * table_width
    begin, end = 0, length - new + tl.minimum(before + tokens, new)  # the last row sees no further
    if window is not None:  # the first row sees the farthest back
        begin = tl.maximum(length - new + before - window + 1, 0) // tile * tile
    most = tl.full([rows], LEAST, tl.float32)
    total = tl.zeros([rows], tl.float32)
    acc = tl.zeros([rows, block_dim], tl.float32)
    page = look_up(table, begin, length, page_size, tile)
    for first in range(begin, end, tile):
        token = first + tl.arange(0, tile)
        there = ((page * kv_heads + kv_head) * page_size + token % page_size)[:, None] * head_dim + dim
        is_there = (token < length)[:, None] & (dim < head_dim)
        key = tl.load(keys + there, mask=is_there, other=0.0)
        value = tl.load(values + there, mask=is_there, other=0.0)
        page = look_up(table, first + tile, length, page_size, tile)
        seen = token <= position[:, None]
        if window is not None:
            seen &= token > position[:, None] - window
        scores = tl.dot(q, tl.trans(key), input_precision=PRECISION) * scale
        most, total, acc = accumulate(tl.where(seen, scores, -float("inf")), value, most, total, acc)
    acc /= tl.where(total == 0, 1.0, total)[:, None]
    tl.store(result + here[:, None] * head_dim + dim, acc.to(result.dtype.element_ty), mask=is_here)


# endregion


def tiling(head_dim: int, itemsize: int, group: int) -> Tiling:
    """Rows for one new token at least."""
    if itemsize == 4:  # products of float32 take more registers, and no tensor cores
        tiles = Tiling(32 if head_dim <= 128 else 16, 16, 8, 2, maxnreg=255)
    elif head_dim <= 64:
        tiles = Tiling(64, 64, 4, 3, maxnreg=255)
    else:
        tiles = Tiling(128, 64, 8, 3) if head_dim <= 128 else Tiling(64, 32, 8, 2)
    return tiles._replace(rows=max(tiles.rows, block(group)))


def constants(
    heads: int, kv_heads: int, page_size: int, head_dim: int, tiles: Tiling, window: int | None
) -> dict[str, int | None]:
    """What the kernel is compiled for."""
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
    query: Tensor, keys: Tensor, values: Tensor, result: Tensor, ragged: Ragged, scale: float, window: int | None = None
) -> None:
    """Attend for every sequence of any ragged batch."""
    heads, (_, kv_heads, page_size, head_dim) = query.shape[1], keys.shape
    group = heads // kv_heads
    tiles = tiling(head_dim, keys.element_size(), group)
    blocks = triton.cdiv(ragged.longest_query, tiles.rows // group)
    with torch.cuda.device(query.get_device()):
        prefill_kernel[blocks, len(ragged.lengths), kv_heads](
            query,
            keys,
            values,
            result,
            ragged.starts,
            ragged.lengths,
            ragged.pages,
            ragged.pages.stride(0),
            scale * LOG2_E,
            **constants(heads, kv_heads, page_size, head_dim, tiles, window),
            **tiles.options,
        )

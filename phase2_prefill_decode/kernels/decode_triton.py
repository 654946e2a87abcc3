# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""Attention for decodes: few new tokens, many keys. A sequence is split, so that all of a GPU can read it.

A decode reads every key and value once and computes next to nothing with them. With one program for each sequence and
KV head most of a GPU would be idle, so a sequence is cut into splits of `chunk` tokens, and a second kernel joins what
they found. The heads of a group are rows of one tile: what is read for one of them serves all.

Where a sequence is cut depends on nothing but its own length, so what comes out is the same to the last bit in any
company. Grids are made of host integers, and these are upper bounds: a program without work ends at once. So a captured
launch serves any batch of no more sequences, of no more than `longest` tokens each.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from phase2_prefill_decode.kernels.attention import Ragged
from phase2_prefill_decode.kernels.tiles_triton import LEAST, LOG2_E, PRECISION, Tiling, accumulate, block, look_up

CHUNK = 512  # tokens of a split: many enough that starting and joining cost little, few enough to make many splits
SPLITS = 16  # that join_kernel takes at once


# region decode
@triton.jit(
    do_not_specialize=["table_width", "most_splits"],
    # These are parts of one buffer, wherever in it they begin.
    do_not_specialize_on_alignment=["starts", "lengths", "pages", "work"],
)
def decode_kernel(
    query,  # [tokens, heads, head_dim]
    keys,  # [pages, kv_heads, page_size, head_dim]
    values,
    result,  # [tokens, heads, head_dim]
    parts,  # [splits of all sequences, queries, heads, head_dim] float32: what each split found
    sizes,  # [splits of all sequences, queries, heads] float32: log2 of the sum of its weights
    firsts,  # [sequences]: which of them is a sequence's first; written here, for the join
    starts,
    lengths,
    pages,
    work,  # [programs, 2]: the sequence and the split of each program; None: a program for every pair of them
    table_width,
    most_splits,
    scale,  # times log2(e)
    kv_heads: tl.constexpr,
    group: tl.constexpr,  # query heads for each of them
    head_dim: tl.constexpr,
    block_dim: tl.constexpr,  # head_dim, up to a power of two
    page_size: tl.constexpr,
    queries: tl.constexpr,  # new tokens at most; a sequence with more is left alone
    rows: tl.constexpr,  # queries * group, up to what a tensor-core instruction takes
    tile: tl.constexpr,  # tokens read at once
    chunk: tl.constexpr,
    window: tl.constexpr,
):
    """A program is one split of one sequence, for one group of heads."""
    sequence, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    number = sequence * most_splits + split  # of the split among those of all sequences
    if work is not None:
        number = sequence
        sequence, split = tl.load(work + 2 * sequence), tl.load(work + 2 * sequence + 1)
    start = tl.load(starts + sequence)
    new = tl.load(starts + sequence + 1) - start
    length = tl.load(lengths + sequence)
    begin, splits = cuts(length, new, chunk, window)
    if (new > queries) | (split >= splits):
        return

    row, dim = tl.arange(0, rows), tl.arange(0, block_dim)
    position = length - new + row // group  # in its sequence, of the token of each row
    here = row // group * kv_heads * group + kv_head * group + row % group  # from the sequence's first row on
    is_here = (row < new * group)[:, None] & (dim < head_dim)
    first_row = start.to(tl.int64) * kv_heads * group
    q = tl.load(query + (first_row + here)[:, None] * head_dim + dim, mask=is_here, other=0.0)

    begin += split * chunk
    end = tl.minimum(begin + chunk, length)
    if window is not None:  # a tile that lies before the windows of all rows is not read
        begin = tl.maximum(begin, (length - new - window + 1) // tile * tile)
    table = pages + sequence.to(tl.int64) * table_width
    page = look_up(table, begin, length, page_size, tile)
    most = tl.full([rows], LEAST, tl.float32)
    total = tl.zeros([rows], tl.float32)
    acc = tl.zeros([rows, block_dim], tl.float32)
    for first in range(begin, end, tile):
        # region exercise 2.7
        token = first + tl.arange(0, tile)
        there = ((page * kv_heads + kv_head) * page_size + token % page_size)[:, None] * head_dim + dim
        is_there = (token < length)[:, None] & (dim < head_dim)
        key = tl.load(keys + there, mask=is_there, other=0.0)
        value = tl.load(values + there, mask=is_there, other=0.0)  # 0, for a weight of 0 times NaN would be NaN
        page = look_up(table, first + tile, length, page_size, tile)  # of the next tile, while this one is on its way
        seen = token <= position[:, None]
        if window is not None:
            seen &= token > position[:, None] - window
        scores = tl.dot(q, tl.trans(key), input_precision=PRECISION) * scale
        most, total, acc = accumulate(tl.where(seen, scores, -float("inf")), value, most, total, acc)
        # endregion

    acc /= tl.where(total == 0, 1.0, total)[:, None]  # a row that saw nothing is 0
    if splits == 1:  # nothing to join
        there = (first_row + here)[:, None] * head_dim + dim
        tl.store(result + there, acc.to(result.dtype.element_ty), mask=is_here)
    else:
        if split == 0:
            tl.store(firsts + sequence, number)
        part = number.to(tl.int64) * queries * kv_heads * group + here
        tl.store(parts + part[:, None] * head_dim + dim, acc, mask=is_here)
        tl.store(sizes + part, most + tl.log2(total), mask=row < new * group)


# endregion


@triton.jit
def cuts(length, new, chunk: tl.constexpr, window: tl.constexpr):
    """Where the first split begins, and how many there are. All borders are multiples of chunk, window or not."""
    origin = 0
    if window is not None:
        origin = tl.maximum(length - new - window + 1, 0) // chunk * chunk
    return origin, tl.maximum(tl.cdiv(length - origin, chunk), 1)


# region join
@triton.jit(do_not_specialize_on_alignment=["starts", "lengths"])
def join_kernel(
    result,
    parts,
    sizes,
    firsts,
    starts,
    lengths,
    heads: tl.constexpr,
    head_dim: tl.constexpr,
    block_dim: tl.constexpr,
    queries: tl.constexpr,
    at_once: tl.constexpr,  # so many splits
    chunk: tl.constexpr,
    window: tl.constexpr,
):
    """A program joins the splits of one head of one new token: their mean, each with the sum of its weights."""
    sequence, query, head = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    start = tl.load(starts + sequence)
    new = tl.load(starts + sequence + 1) - start
    _, splits = cuts(tl.load(lengths + sequence), new, chunk, window)
    if (new > queries) | (query >= new) | (splits == 1):
        return

    dim = tl.arange(0, block_dim)
    row = (tl.load(firsts + sequence).to(tl.int64) * queries + query) * heads + head  # of the first split
    most = tl.full([], LEAST, tl.float32)
    total = tl.zeros([], tl.float32)
    acc = tl.zeros([block_dim], tl.float32)
    for first in range(0, splits, at_once):
        split = first + tl.arange(0, at_once)
        is_part = (split < splits)[:, None] & (dim < head_dim)
        there = row + split * queries * heads
        size = tl.load(sizes + there, mask=split < splits, other=-float("inf"))
        part = tl.load(parts + there[:, None] * head_dim + dim, mask=is_part, other=0.0)
        # region exercise 2.4
        higher = tl.maximum(most, tl.max(size, 0))
        shrink = tl.exp2(most - higher)  # what was summed up so far was relative to a lower size
        weight = tl.exp2(size - higher)
        total = total * shrink + tl.sum(weight, 0)
        acc = acc * shrink + tl.sum(weight[:, None] * part, 0)
        most = higher
        # endregion
    here = ((start + query).to(tl.int64) * heads + head) * head_dim + dim
    tl.store(result + here, (acc / total).to(result.dtype.element_ty), mask=dim < head_dim)


# endregion


def tiling(head_dim: int, itemsize: int, rows: int) -> Tiling:
    """For so many rows with something in them."""
    wide = head_dim > 128
    if itemsize == 4:  # products of float32 take more registers, and no tensor cores
        return Tiling(block(rows), 16 if wide else 32, 8, 3, maxnreg=255)
    tile = 32 if wide else 64
    if block(rows) * block(head_dim) > 64 * 128:  # a few tokens of many heads: more than four warps have registers for
        return Tiling(block(rows), tile, 8, 2 if wide else 3)
    return Tiling(block(rows), tile, 4, 3)


def constants(head_dim: int, queries: int, chunk: int, window: int | None) -> dict[str, int | None]:
    """What both kernels are compiled for."""
    return {
        "head_dim": head_dim,
        "block_dim": block(head_dim),
        "queries": queries,
        "chunk": chunk,
        "window": window,
    }


def decode_constants(heads: int, kv_heads: int, page_size: int, tiles: Tiling) -> dict[str, int]:
    """What only decode_kernel is compiled for."""
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
    ragged: Ragged,
    scale: float,
    window: int | None = None,
    *,
    chunk: int = CHUNK,
    work: Tensor | None = None,
) -> None:
    """Attend for the sequences with at most `ragged.longest_query` new tokens; the rows of others are left alone.

    None of those has more than `ragged.longest` tokens. `chunk` is a multiple of 128. `work` lists every split of every
    such sequence; without it there is a program for as many splits of each sequence as the longest has.
    """
    if chunk < 128 or chunk % 128:
        raise ValueError(f"chunk must be a multiple of 128 tokens, got {chunk}")
    heads, (_, kv_heads, page_size, head_dim) = query.shape[1], keys.shape
    sequences, queries = len(ragged.lengths), max(ragged.longest_query, 1)
    seen = ragged.longest if window is None else min(ragged.longest, window + queries + chunk - 2)
    most_splits = max(triton.cdiv(seen, chunk), 1)
    splits = sequences * most_splits if work is None else len(work)
    sizes = query.new_empty((splits, queries, heads), dtype=torch.float32)
    parts = query.new_empty((*sizes.shape, head_dim), dtype=torch.float32)
    firsts = query.new_empty(sequences, dtype=torch.int32)
    tiles = tiling(head_dim, keys.element_size(), queries * heads // kv_heads)
    both = constants(head_dim, queries, chunk, window)
    grid = (sequences, kv_heads, most_splits) if work is None else (len(work), kv_heads)
    with torch.cuda.device(query.get_device()):
        decode_kernel[grid](
            query,
            keys,
            values,
            result,
            parts,
            sizes,
            firsts,
            ragged.starts,
            ragged.lengths,
            ragged.pages,
            work,
            ragged.pages.stride(0),
            most_splits,
            scale * LOG2_E,
            **decode_constants(heads, kv_heads, page_size, tiles),
            **both,
            **tiles.options,
        )
        if most_splits > 1:
            batch = ragged.starts, ragged.lengths
            join_kernel[sequences, queries, heads](
                result, parts, sizes, firsts, *batch, heads=heads, at_once=SPLITS, **both
            )

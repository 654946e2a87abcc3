# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""Attention for a step of any mixture: the kernel for chunks and whole prompts, and the launch of both kernels.

`plan` says which sequence goes to which kernel and why. Decodes go to phase 2's kernel, here with a table of their
splits. The kernel here is phase 2's for prefills, made fast for chunks that stand behind a long context:

- Its blocks come from a table, the ones that see most first.
- Nearly all keys of a chunk lie before all of its queries. Those tiles need no mask, neither for what may be seen nor
  for where the sequence ends. Masks are left for the diagonal, and for windows, which are short.

Both tables are made once a step, not once a layer, and travel to the device in one copy.
"""

from dataclasses import dataclass, replace

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from phase2_prefill_decode.kernels.attention import Ragged, refuse_misfits
from phase2_prefill_decode.kernels.decode_triton import CHUNK, decode
from phase2_prefill_decode.kernels.prefill_triton import constants, tiling
from phase2_prefill_decode.kernels.tiles_triton import LEAST, LOG2_E, PRECISION, accumulate, look_up
from phase3_chunked_prefill.kernels.plan import FEW, plan


# region ragged
@triton.jit(
    do_not_specialize=["table_width"],
    do_not_specialize_on_alignment=["starts", "lengths", "pages", "blocks"],  # parts of buffers, wherever they begin
)
def ragged_kernel(
    query,  # [tokens, heads, head_dim]
    keys,  # [pages, kv_heads, page_size, head_dim]
    values,
    result,  # [tokens, heads, head_dim]
    starts,
    lengths,
    pages,
    blocks,  # [blocks, 2]: a sequence, and the first of its new tokens in the block
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
    """A program is one block of new tokens, for one group of heads."""
    kv_head, number = tl.program_id(0), tl.program_id(1)
    sequence, before = tl.load(blocks + 2 * number), tl.load(blocks + 2 * number + 1)
    start = tl.load(starts + sequence)
    new = tl.load(starts + sequence + 1) - start
    length = tl.load(lengths + sequence)
    tokens: tl.constexpr = rows // group  # of a block; where group is no power of two, some rows are left over

    row, dim = tl.arange(0, rows), tl.arange(0, block_dim)
    mine = before + row // group  # the new token of each row
    position = length - new + mine  # in its sequence
    here = (start + mine).to(tl.int64) * kv_heads * group + kv_head * group + row % group
    is_here = ((row < tokens * group) & (mine < new))[:, None] & (dim < head_dim)
    q = tl.load(query + here[:, None] * head_dim + dim, mask=is_here, other=0.0)
    table = pages + sequence.to(tl.int64) * table_width
    most = tl.full([rows], LEAST, tl.float32)
    total = tl.zeros([rows], tl.float32)
    acc = tl.zeros([rows, block_dim], tl.float32)

    first, last = length - new + before, length - new + tl.minimum(before + tokens, new) - 1  # positions of the block
    # region exercise 3.4
    if window is None:
        begin = (first + 1) // tile * tile  # tiles up to there lie before all rows
        most, total, acc = walk(
            0, begin, q, keys, values, table, position, length, scale, most, total, acc,
            kv_head, kv_heads, head_dim, block_dim, page_size, tile, window, False,
        )  # fmt: skip
    else:
        begin = tl.maximum(first - window + 1, 0) // tile * tile
    most, total, acc = walk(
        begin, last + 1, q, keys, values, table, position, length, scale, most, total, acc,
        kv_head, kv_heads, head_dim, block_dim, page_size, tile, window, True,
    )  # fmt: skip
    # endregion
    acc /= tl.where(total == 0, 1.0, total)[:, None]
    tl.store(result + here[:, None] * head_dim + dim, acc.to(result.dtype.element_ty), mask=is_here)


@triton.jit
def walk(
    begin, end, q, keys, values, table, position, length, scale, most, total, acc,
    kv_head, kv_heads: tl.constexpr, head_dim: tl.constexpr, block_dim: tl.constexpr, page_size: tl.constexpr,
    tile: tl.constexpr, window: tl.constexpr, masked: tl.constexpr,
):  # fmt: skip
    """Attend to the keys from begin to end. Without a mask all rows see all of them, and all of them are there."""
    dim = tl.arange(0, block_dim)
    page = look_up(table, begin, length, page_size, tile)
    for first in range(begin, end, tile):
        token = first + tl.arange(0, tile)
        there = ((page * kv_heads + kv_head) * page_size + token % page_size)[:, None] * head_dim + dim
        is_there = (dim < head_dim)[None, :]
        if masked:
            is_there = (token < length)[:, None] & is_there
        key = tl.load(keys + there, mask=is_there, other=0.0)
        value = tl.load(values + there, mask=is_there, other=0.0)
        page = look_up(table, first + tile, length, page_size, tile)
        scores = tl.dot(q, tl.trans(key), input_precision=PRECISION) * scale
        if masked:
            seen = token <= position[:, None]
            if window is not None:
                seen &= token > position[:, None] - window
            scores = tl.where(seen, scores, -float("inf"))
        most, total, acc = accumulate(scores, value, most, total, acc)
    return most, total, acc


# endregion


@dataclass(frozen=True, slots=True)
class Tables:
    """A plan on the device."""

    work: Tensor  # for the decode kernel
    short: Ragged  # the batch, within the bounds of its short sequences
    blocks: Tensor  # for the kernel here


# region attend
def attend(
    query: Tensor, keys: Tensor, values: Tensor, ragged: Ragged, scale: float, window: int | None = None
) -> Tensor:
    """Every sequence by the kernel that suits it. One launch for chunks and prompts, one for what is short.

    Of a batch of short sequences whose sizes only the device knows, nothing is asked. It goes to the decode kernel as
    it is, with the largest grid that `longest` calls for: this is how a step comes here to be captured.
    """
    refuse_misfits(query, keys, values)
    query, result = query.contiguous(), torch.empty_like(query, memory_format=torch.contiguous_format)
    if ragged.longest_query <= FEW and not ragged.sizes:
        decode(query, keys, values, result, ragged, scale, window)
        return result
    heads, (_, kv_heads, page_size, head_dim) = query.shape[1], keys.shape
    group = heads // kv_heads
    tiles = tiling(head_dim, keys.element_size(), group)
    tables = tables_of(ragged, group, tiles.rows // group, window)
    if len(tables.blocks) > 0:
        with torch.cuda.device(query.get_device()):
            ragged_kernel[kv_heads, len(tables.blocks)](
                query,
                keys,
                values,
                result,
                ragged.starts,
                ragged.lengths,
                ragged.pages,
                tables.blocks,
                ragged.pages.stride(0),
                scale * LOG2_E,
                **constants(heads, kv_heads, page_size, head_dim, tiles, window),
                **tiles.options,
            )
    if len(tables.work) > 0:
        decode(query, keys, values, result, tables.short, scale, window, work=tables.work)
    return result


# endregion


def tables_of(ragged: Ragged, group: int, block: int, window: int | None) -> Tables:
    """Planned once for each kind of layer, and kept with the batch. `block` is in new tokens."""
    key = group, block, window
    if key not in ragged.plans:
        planned = plan(ragged.host_sizes(), group, block, CHUNK, window)
        table = torch.from_numpy(np.concatenate((planned.splits, planned.blocks)))
        device = ragged.starts.device
        if device.type == "cuda":
            table = table.pin_memory().to(device, non_blocking=True)
        ragged.plans[key] = Tables(
            work=table[: len(planned.splits)],
            blocks=table[len(planned.splits) :],
            short=replace(ragged, longest_query=planned.queries, longest=planned.longest),
        )
    tables: Tables = ragged.plans[key]
    return tables

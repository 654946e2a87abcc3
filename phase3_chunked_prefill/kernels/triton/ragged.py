# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""Attention for steps that mix decodes, chunks and prompts: the kernel for chunks and prompts, and the launch of both.

`plan` assigns each sequence to a kernel. Decodes go to phase 2's decode kernel. The kernel in this module is phase 2's
prefill kernel, made fast for chunks behind a long context:

- Its blocks come from a table, those that see the most keys first.
- Nearly all keys of a chunk precede all of its queries. These tiles need no mask, neither causal nor
  for the length. Masks remain for the diagonal, and for windows, which are short.

The table is made once per step, not once per layer.
"""

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from phase1_kv_pool.kernels.triton.launch import jit
from phase2_prefill_decode.kernels.attention import AttentionMetadata, check_shapes
from phase2_prefill_decode.kernels.triton.decode import decode
from phase2_prefill_decode.kernels.triton.prefill import constants, tiling
from phase2_prefill_decode.kernels.triton.tiles import LOG2_E, LOWEST, PRECISION, accumulate, lookup_pages
from phase3_chunked_prefill.kernels.plan import FEW, plan


# region exercise 3.5
@jit(
    do_not_specialize=["table_width"],
    do_not_specialize_on_alignment=["cu_seqlens_q", "seq_lens", "page_table", "blocks"],  # views at any offset
)
def ragged_kernel(
    query,  # [tokens, heads, head_dim]
    keys,  # [pages, kv_heads, page_size, head_dim]
    values,
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
    """Each program computes one block of new tokens, for one group of heads."""
    kv_head, number = tl.program_id(0), tl.program_id(1)
    sequence, before = tl.load(blocks + 2 * number), tl.load(blocks + 2 * number + 1)
    start = tl.load(cu_seqlens_q + sequence)
    new = tl.load(cu_seqlens_q + sequence + 1) - start
    length = tl.load(seq_lens + sequence)
    tokens: tl.constexpr = rows // group  # of a block; unless group is a power of two, some rows stay unused

    row, dim = tl.arange(0, rows), tl.arange(0, block_dim)
    mine = before + row // group  # the new token of each row
    position = length - new + mine  # of that token in its sequence
    q_offsets = (start + mine).to(tl.int64) * kv_heads * group + kv_head * group + row % group
    q_mask = ((row < tokens * group) & (mine < new))[:, None] & (dim < head_dim)
    q = tl.load(query + q_offsets[:, None] * head_dim + dim, mask=q_mask, other=0.0)
    table = page_table + sequence.to(tl.int64) * table_width
    m_i = tl.full([rows], LOWEST, tl.float32)
    l_i = tl.zeros([rows], tl.float32)
    acc = tl.zeros([rows, block_dim], tl.float32)

    first, last = length - new + before, length - new + tl.minimum(before + tokens, new) - 1  # positions of the block
    if window is None:
        begin = (first + 1) // tile * tile  # tiles before `begin` precede all rows
        m_i, l_i, acc = walk(
            0, begin, q, keys, values, table, position, length, scale, m_i, l_i, acc,
            kv_head, kv_heads, head_dim, block_dim, page_size, tile, window, False,
        )  # fmt: skip
    else:
        begin = tl.maximum(first - window + 1, 0) // tile * tile
    m_i, l_i, acc = walk(
        begin, last + 1, q, keys, values, table, position, length, scale, m_i, l_i, acc,
        kv_head, kv_heads, head_dim, block_dim, page_size, tile, window, True,
    )  # fmt: skip
    acc /= tl.where(l_i == 0, 1.0, l_i)[:, None]
    tl.store(result + q_offsets[:, None] * head_dim + dim, acc.to(result.dtype.element_ty), mask=q_mask)


@triton.jit
def walk(
    begin, end, q, keys, values, table, position, length, scale, m_i, l_i, acc,
    kv_head, kv_heads: tl.constexpr, head_dim: tl.constexpr, block_dim: tl.constexpr, page_size: tl.constexpr,
    tile: tl.constexpr, window: tl.constexpr, masked: tl.constexpr,
):  # fmt: skip
    """Attend to the keys from begin to end. Unmasked, every key exists and every row sees it."""
    dim = tl.arange(0, block_dim)
    page = lookup_pages(table, begin, length, page_size, tile)
    for first in range(begin, end, tile):
        token = first + tl.arange(0, tile)
        kv_offsets = ((page * kv_heads + kv_head) * page_size + token % page_size)[:, None] * head_dim + dim
        kv_mask = (dim < head_dim)[None, :]
        if masked:
            kv_mask = (token < length)[:, None] & kv_mask
        key = tl.load(keys + kv_offsets, mask=kv_mask, other=0.0)
        value = tl.load(values + kv_offsets, mask=kv_mask, other=0.0)
        page = lookup_pages(table, first + tile, length, page_size, tile)
        scores = tl.dot(q, tl.trans(key), input_precision=PRECISION) * scale
        if masked:
            seen = token <= position[:, None]
            if window is not None:
                seen &= token > position[:, None] - window
            scores = tl.where(seen, scores, -float("inf"))
        m_i, l_i, acc = accumulate(scores, value, m_i, l_i, acc)
    return m_i, l_i, acc


# endregion


# region attend
def attend(
    query: Tensor, keys: Tensor, values: Tensor, metadata: AttentionMetadata, scale: float, window: int | None = None
) -> Tensor:
    """Run each sequence on the kernel that `plan` assigns: one launch for chunks and prompts, one for short sequences.

    A step of short sequences needs no plan and no sizes on the host, so it can be captured in a CUDA graph.
    """
    check_shapes(query, keys, values)
    query, result = query.contiguous(), torch.empty_like(query, memory_format=torch.contiguous_format)
    if metadata.max_seqlen_q <= FEW:
        decode(query, keys, values, result, metadata, scale, window)
        return result
    heads, (_, kv_heads, page_size, head_dim) = query.shape[1], keys.shape
    group = heads // kv_heads
    tiles = tiling(head_dim, keys.element_size(), group)
    planned = ragged_plan_of(metadata, group, tiles.rows // group, window)
    if len(planned.blocks) > 0:
        with torch.cuda.device(query.get_device()):
            ragged_kernel[kv_heads, len(planned.blocks)](
                query,
                keys,
                values,
                result,
                metadata.cu_seqlens_q,
                metadata.seq_lens,
                metadata.page_table,
                planned.blocks,
                metadata.page_table.stride(0),
                scale * LOG2_E,
                **constants(heads, kv_heads, page_size, head_dim, tiles, window),
                **tiles.options,
            )
    if planned.short is not None:
        decode(query, keys, values, result, planned.short, scale, window)
    return result


# endregion


@dataclass(frozen=True, slots=True)
class RaggedPlan:
    """A plan on the device."""

    blocks: Tensor  # [blocks, 2] for the ragged kernel
    short: AttentionMetadata | None  # the batch with the maxima of its short sequences, if there are any


def ragged_plan_of(metadata: AttentionMetadata, group: int, block: int, window: int | None) -> RaggedPlan:
    """The plan of a step, made once for each kind of layer and kept in the metadata. `block` is in new tokens."""
    key = group, block, window
    if key not in metadata.plans:
        if not metadata.sizes:
            raise ValueError(f"a step with more than {FEW} new tokens of a sequence needs the sizes on the host")
        found = plan(metadata.sizes, group, block, window)
        blocks, device = torch.from_numpy(found.blocks), metadata.cu_seqlens_q.device
        if device.type == "cuda":
            blocks = blocks.pin_memory().to(device, non_blocking=True)
        short = replace(metadata, max_seqlen_q=found.queries, max_seqlen_k=found.longest) if found.queries else None
        metadata.plans[key] = RaggedPlan(blocks, short)
    planned: RaggedPlan = metadata.plans[key]
    return planned

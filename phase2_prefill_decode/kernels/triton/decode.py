# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""Decode attention: few new tokens, many keys. Each sequence is split between programs (split-KV, as in FlashDecoding).

A program for each sequence and KV head would leave most of a GPU idle, so sequences are cut into splits, and a second
kernel joins their results. The query heads of a group are rows of one tile: a key loaded for one of them serves all.

`splits` makes the table of splits on the device, and programs walk over it in steps of the grid. So the host needs no
lengths: a launch recorded in a CUDA graph serves any batch of as many sequences, of at most `max_seqlen_k` tokens.
"""

from functools import cache
from math import gcd
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from phase1_kv_pool.kernels.triton.launch import jit
from phase1_kv_pool.layer import HIGHEST, KVLayer
from phase2_prefill_decode.kernels.attention import AttentionMetadata
from phase2_prefill_decode.kernels.triton.splits import Splits, splits_of
from phase2_prefill_decode.kernels.triton.tiles import LOG2_E, LOWEST, Tiling, block, constants, walk
from phase2_prefill_decode.kernels.triton.tuning import Tuning, default

JOINED = 512  # numbers of the result that a program of join_kernel computes, at most
AT_ONCE = 8  # splits that it loads at once
REGISTERS = 65536  # a multiprocessor has, on every GPU of today


# region exercise 2.17
@jit(
    do_not_specialize=["sequences", "table_width"],
    do_not_specialize_on_alignment=["cu_seqlens_q", "seq_lens", "page_table", "sinks"],  # views, at any offset
)
def decode_kernel(
    query,  # [tokens, heads, head_dim]
    keys,  # [pages, kv_heads, page_size, head_dim]
    values,
    key_scales,  # [pages, kv_heads, page_size], or None
    value_scales,
    sinks,  # [heads], or None
    result,  # [tokens, heads, head_dim]
    parts,  # [most splits, queries, heads, head_dim] float32: the result of each split
    lse,  # [most splits, queries, heads] float32: log2 of the sum of the split's weights (log-sum-exp)
    work,  # [most splits, 4]: a sequence, the first key of the split, the key after its last, the sequence's splits
    cu_splits,  # [sequences + 1]; the last is the number of all splits
    cu_seqlens_q,  # [sequences + 1]
    seq_lens,  # [sequences]
    page_table,  # [sequences, table_width]
    sequences,
    table_width,
    scale,  # times log2(e)
    kv_heads: tl.constexpr,
    group: tl.constexpr,  # query heads per KV head
    head_dim: tl.constexpr,
    block_dim: tl.constexpr,  # head_dim, rounded up to a power of two
    page_size: tl.constexpr,
    queries: tl.constexpr,  # new tokens of a sequence, at most
    rows: tl.constexpr,  # queries * group, rounded up to a tensor-core tile
    tile: tl.constexpr,  # tokens loaded at once
    window: tl.constexpr,
):
    """Each program computes splits, one after the other and of any sequence, for one group of heads."""
    kv_head, row, dim = tl.program_id(0), tl.arange(0, rows), tl.arange(0, block_dim)
    q_offsets = row // group * kv_heads * group + kv_head * group + row % group  # from the sequence's first row
    for number in range(tl.program_id(1), tl.load(cu_splits + sequences), tl.num_programs(1)):
        sequence, splits = tl.load(work + number * 4), tl.load(work + number * 4 + 3)
        begin, end = tl.load(work + number * 4 + 1), tl.load(work + number * 4 + 2)
        start = tl.load(cu_seqlens_q + sequence)
        new, length = tl.load(cu_seqlens_q + sequence + 1) - start, tl.load(seq_lens + sequence)
        position = length - new + row // group  # where each row's token is in its sequence
        q_mask = (row < new * group)[:, None] & (dim < head_dim)
        first_row = start.to(tl.int64) * kv_heads * group
        q = tl.load(query + (first_row + q_offsets)[:, None] * head_dim + dim, mask=q_mask, other=0.0)
        table = page_table + sequence.to(tl.int64) * table_width
        m_i = tl.full([rows], LOWEST, tl.float32)
        l_i = tl.zeros([rows], tl.float32)
        acc = tl.zeros([rows, block_dim], tl.float32)
        if sinks is not None:  # the first split starts at a score without a value
            is_first = number == tl.load(cu_splits + sequence)
            m_i = tl.where(is_first, tl.load(sinks + kv_head * group + row % group).to(tl.float32) * LOG2_E, m_i)
            l_i += tl.where(is_first, 1.0, 0.0)
        m_i, l_i, acc = walk(
            begin, end, q, position, (m_i, l_i, acc), (keys, values, key_scales, value_scales), table, length, scale,
            kv_head, (kv_heads, page_size, head_dim), tile, window, True,
        )  # fmt: skip
        acc /= tl.where(l_i == 0, 1.0, l_i)[:, None]  # a row without visible keys is 0
        if splits == 1:  # nothing to join
            out = (first_row + q_offsets)[:, None] * head_dim + dim
            tl.store(result + out, acc.to(result.dtype.element_ty), mask=q_mask)
        else:
            part = (number * queries * kv_heads * group + q_offsets).to(tl.int64)
            tl.store(parts + part[:, None] * head_dim + dim, acc, mask=q_mask)
            tl.store(lse + part, m_i + tl.log2(l_i), mask=row < new * group)


# endregion


# region exercise 2.18
@jit(do_not_specialize_on_alignment=["cu_seqlens_q"])
def join_kernel(
    result,
    parts,
    lse,
    cu_splits,
    cu_seqlens_q,
    heads: tl.constexpr,
    head_dim: tl.constexpr,
    block_dim: tl.constexpr,
    queries: tl.constexpr,
    rows: tl.constexpr,  # heads of a program
    at_once: tl.constexpr,  # splits loaded at once
):
    """Each program joins the splits of some heads of one new token: their mean, each weighted by its sum."""
    sequence, query = tl.program_id(0), tl.program_id(1)
    head, dim = tl.program_id(2) * rows + tl.arange(0, rows), tl.arange(0, block_dim)
    start, number = tl.load(cu_seqlens_q + sequence), tl.load(cu_splits + sequence)
    splits = tl.load(cu_splits + sequence + 1) - number
    if (splits < 2) | (query >= tl.load(cu_seqlens_q + sequence + 1) - start):
        return

    m_i = tl.full([rows], LOWEST, tl.float32)
    l_i = tl.zeros([rows], tl.float32)
    acc = tl.zeros([rows, block_dim], tl.float32)
    for first in range(0, splits, at_once):
        split = first + tl.arange(0, at_once)[:, None]
        part = ((number + split) * queries + query).to(tl.int64) * heads + head
        is_part = (split < splits)[:, :, None] & (dim < head_dim)
        lse_j = tl.load(lse + part, mask=split < splits, other=-float("inf"))
        acc_j = tl.load(parts + part[:, :, None] * head_dim + dim, mask=is_part, other=0.0)
        m_new = tl.maximum(m_i, tl.max(lse_j, 0))
        alpha = tl.exp2(m_i - m_new)  # rescales what was summed relative to the lower maximum
        p = tl.exp2(lse_j - m_new)
        l_i = l_i * alpha + tl.sum(p, 0)
        acc = acc * alpha[:, None] + tl.sum(p[:, :, None] * acc_j, 0)
        m_i = m_new
    out = ((start + query).to(tl.int64) * heads + head)[:, None] * head_dim + dim
    tl.store(result + out, (acc / l_i[:, None]).to(result.dtype.element_ty), mask=(dim < head_dim)[None, :])


# endregion


def tiling(head_dim: int, itemsize: int, rows: int, tuning: Tuning, in_8_bits: bool = False) -> Tiling:
    """The tiling for `rows` used rows of `itemsize` bytes a number: if these are few, the tuned one. Keys and values in
    8 bits take more registers: they are widened."""
    if tuning.tile and block(rows) == 16:
        return Tiling(16, tuning.tile, tuning.num_warps, tuning.num_stages)
    sums = block(rows) * block(head_dim)  # in registers, with the queries and a tile of scores
    if itemsize == 4:  # float32 products take more registers and no tensor cores
        if sums > 64 * 128:
            return Tiling(block(rows), 16, 16, 1)
        if sums > 32 * 128:
            return Tiling(block(rows), 16, 16, 1 if in_8_bits else 2, maxnreg=128)
        return Tiling(block(rows), 32 if sums <= 16 * 128 else 16, 8, 1 if in_8_bits else 3, maxnreg=255)
    wide = head_dim > 128
    if sums > 32 * 128:  # more registers than four warps have
        tile = 16 if wide and sums > 64 * 128 else 32 if wide else 64
        return Tiling(block(rows), tile, 8, 2 if wide else 3, maxnreg=255 if wide else None)
    return Tiling(block(rows), 32 if wide else 64, 4, 3, maxnreg=192 if in_8_bits else None)


def join_constants(heads: int, head_dim: int, queries: int) -> dict[str, int]:
    """The compile-time constants of join_kernel. `rows` divides the number of heads."""
    shape = {"heads": heads, "head_dim": head_dim, "block_dim": block(head_dim), "queries": queries}
    return {**shape, "rows": gcd(heads, max(JOINED // block(head_dim), 1)), "at_once": AT_ONCE}


@cache
def programs_at_once(device: torch.device, tiles: Tiling, head_dim: int, itemsize: int) -> int:
    """How many programs of decode_kernel a GPU runs at once. Tests hold compiled kernels to these needs."""
    if device.type != "cuda":
        return 8  # interpreted: few, so that a program computes several splits
    gpu = torch.cuda.get_device_properties(device)
    registers = (tiles.maxnreg or (168 if head_dim <= 128 else 200)) * 32 * tiles.num_warps
    shared = tiles.buffers(head_dim, itemsize) + 11 * 1024  # queries and weights 10 KiB, the system's own 1
    fit = min(REGISTERS // registers, gpu.shared_memory_per_multiprocessor // shared)
    return max(fit, 1) * int(gpu.multi_processor_count)


class DecodePlan(NamedTuple):
    """The plan of a step, shared by the launches of all layers of a kind."""

    splits: Splits
    parts: Tensor  # one layer after the other
    lse: Tensor
    grid: tuple[int, int]
    decode: dict[str, Any]  # constants and options
    join_grid: tuple[int, int, int]
    join: dict[str, int]


def decode_plan_of(
    metadata: AttentionMetadata,
    query: Tensor,
    keys: Tensor,
    window: int | None,
    tuning: Tuning | None,
) -> DecodePlan:
    """Plan a step at the first layer of a kind, and keep the plan in the metadata."""
    capturing = keys.is_cuda and torch.cuda.is_current_stream_capturing()  # a graph makes its own table
    heads, itemsize = query.shape[1], query.element_size()  # in which keys of 8 bits are multiplied, too
    key = heads, itemsize, keys.shape[1:], keys.dtype, window, tuning, capturing
    if key not in metadata.plans:
        _, kv_heads, page_size, head_dim = keys.shape
        group, queries = heads // kv_heads, triton.next_power_of_2(max(metadata.max_seqlen_q, 1))
        tuning = tuning or default(group)
        tiles = tiling(head_dim, itemsize, queries * group, tuning, keys.dtype in HIGHEST)
        splits = splits_of(metadata, kv_heads, queries, tuning.chunk, tiles.tile, window)
        programs = max(programs_at_once(keys.device, tiles, head_dim, itemsize) // kv_heads, 1)
        join = join_constants(heads, head_dim, queries)
        lse = query.new_empty((splits.most, queries, heads), dtype=torch.float32)
        metadata.plans[key] = DecodePlan(
            splits,
            query.new_empty((*lse.shape, head_dim), dtype=torch.float32),
            lse,
            (kv_heads, min(programs, splits.most)),
            constants(heads, kv_heads, page_size, head_dim, tiles, window) | tiles.options | {"queries": queries},
            (len(metadata.seq_lens), queries, heads // join["rows"]),
            join,
        )
    planned: DecodePlan = metadata.plans[key]
    return planned


def decode(
    query: Tensor,
    kv: KVLayer,
    result: Tensor,
    metadata: AttentionMetadata,
    scale: float,
    window: int | None = None,
    tuning: Tuning | None = None,
    sinks: Tensor | None = None,
) -> None:
    """Compute the sequences with at most `metadata.max_seqlen_q` new tokens, rounded up to a power of two.

    None of these has more than `metadata.max_seqlen_k` tokens. Rows of other sequences are left unchanged. Nothing is
    read from the device, and all memory is of a size that the host knows, so a launch can be captured.
    """
    step = decode_plan_of(metadata, query, kv.keys, window, tuning)
    splits, parts, lse = step.splits, step.parts, step.lse
    with torch.cuda.device(query.get_device()):
        decode_kernel[step.grid](
            query, *kv, sinks, result, parts, lse, splits.work, splits.cu_splits, metadata.cu_seqlens_q,
            metadata.seq_lens, metadata.page_table, len(metadata.seq_lens), metadata.page_table.stride(0),
            scale * LOG2_E.value, **step.decode,
        )  # fmt: skip
        if splits.most_of_one > 1:
            join_kernel[step.join_grid](result, parts, lse, splits.cu_splits, metadata.cu_seqlens_q, **step.join)

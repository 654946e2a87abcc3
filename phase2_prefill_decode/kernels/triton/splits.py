# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""The table of splits: which keys of which sequence each split of the decode kernel covers.

It is made on the device, once a step for each kind of layer, from the lengths that lie there. The host need not know
them, so a recorded step (a CUDA graph) follows them. The host sets only an upper bound, which sizes the table.

Where a sequence is cut depends on its own length alone, so its result is the same to the last bit in any batch. It gets
a split for every `chunk` keys, up to `max_splits`; longer sequences get longer splits. That bounds the memory for the
results of splits, whatever the context.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from phase1_kv_pool.kernels.triton.launch import jit
from phase2_prefill_decode.kernels.attention import AttentionMetadata

PROGRAMS = 256  # splits x KV heads of a sequence, at most: alone, it still fills a GPU of over a hundred processors
AT_ONCE = 1024  # sequences that splits_kernel loads at once


# region exercise 2.16
@jit(do_not_specialize_on_alignment=["cu_seqlens_q", "seq_lens"])
def splits_kernel(
    work,  # [most splits, 4]: a sequence, the first key of the split, the key after its last, the sequence's splits
    cu_splits,  # [sequences + 1]: the splits of sequence i are rows cu_splits[i] to cu_splits[i + 1] of `work`
    cu_seqlens_q,  # [sequences + 1]
    seq_lens,  # [sequences]
    queries: tl.constexpr,
    chunk: tl.constexpr,
    max_splits: tl.constexpr,
    tile: tl.constexpr,
    window: tl.constexpr,
    at_once: tl.constexpr,
):
    """Each program lists the splits of one sequence, after the splits of all earlier sequences."""
    sequence = tl.program_id(0)
    number = 0  # its first split
    for first in range(0, sequence, at_once):
        other = first + tl.arange(0, at_once)
        _, _, splits = cuts(cu_seqlens_q, seq_lens, other, other < sequence, queries, chunk, max_splits, tile, window)
        number += tl.sum(splits, 0)
    begin, size, splits = cuts(cu_seqlens_q, seq_lens, sequence, True, queries, chunk, max_splits, tile, window)
    split = tl.arange(0, max_splits)
    row, is_split = work + (number + split) * 4, split < splits
    tl.store(row, sequence, mask=is_split)
    tl.store(row + 1, begin + split * size, mask=is_split)
    tl.store(row + 2, tl.minimum(begin + (split + 1) * size, tl.load(seq_lens + sequence)), mask=is_split)
    tl.store(row + 3, splits, mask=is_split)
    if sequence == 0:
        tl.store(cu_splits, 0)
    tl.store(cu_splits + sequence + 1, number + splits)


@triton.jit
def cuts(
    cu_seqlens_q, seq_lens, sequence, mask, queries: tl.constexpr,
    chunk: tl.constexpr, max_splits: tl.constexpr, tile: tl.constexpr, window: tl.constexpr,
):  # fmt: skip
    """Return the first key of the first split, the keys of a split (a multiple of `tile`), and the number of splits.

    A sequence with no new tokens, or with more than `queries`, has none. A padding row, which has no keys, has one: it
    makes the result 0.
    """
    new = tl.load(cu_seqlens_q + sequence + 1, mask, 0) - tl.load(cu_seqlens_q + sequence, mask, 0)
    keys = tl.load(seq_lens + sequence, mask, 0)
    begin = keys * 0
    if window is not None:
        begin = tl.maximum(keys - new - window + 1, 0) // tile * tile
    keys -= begin
    splits = tl.minimum(tl.cdiv(keys, chunk), max_splits)
    size = tl.maximum(tl.cdiv(tl.cdiv(keys, tl.maximum(splits, 1)), tile), 1) * tile
    return begin, size, tl.where((new > 0) & (new <= queries), tl.maximum(tl.cdiv(keys, size), 1), 0)


# endregion


class Splits(NamedTuple):
    """The table of a step, and its size."""

    work: Tensor  # [most, 4] int32
    cu_splits: Tensor  # [sequences + 1] int32
    most: int  # splits of all sequences, at most
    most_of_one: int  # splits of a sequence, at most


def constants(kv_heads: int, queries: int, chunk: int, tile: int, window: int | None) -> dict[str, Any]:
    """The compile-time constants of splits_kernel."""
    max_splits = 1 << max(PROGRAMS // kv_heads, 1).bit_length() - 1
    shape = {"queries": queries, "chunk": chunk, "max_splits": max_splits, "tile": tile, "window": window}
    return {**shape, "at_once": AT_ONCE}


def splits_of(
    metadata: AttentionMetadata, kv_heads: int, queries: int, chunk: int, tile: int, window: int | None
) -> Splits:
    """Make the table of a step. Nothing is read from the device: without sizes on the host, it has room for as many
    splits as `max_seqlen_k` allows."""
    shape, sequences = constants(kv_heads, queries, chunk, tile, window), len(metadata.seq_lens)
    seen = metadata.max_seqlen_k if window is None else min(metadata.max_seqlen_k, window + queries + tile - 2)
    most_of_one = max(min(-(-seen // chunk), shape["max_splits"]), 1)
    most = sequences * most_of_one
    if metadata.sizes:
        short = (length for new, length in metadata.sizes if 0 < new <= queries)
        most = sum(max(min(-(-length // chunk), most_of_one), 1) for length in short)
    work = metadata.seq_lens.new_empty((most, 4))
    cu_splits = metadata.seq_lens.new_empty(sequences + 1)
    with torch.cuda.device(work.get_device()):
        splits_kernel[(sequences,)](work, cu_splits, metadata.cu_seqlens_q, metadata.seq_lens, **shape)
    return Splits(work, cu_splits, most, most_of_one)

"""Packed: the tensors of one step. The tokens of all slices in one row, without padding, and where each belongs."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from phase0_request.batch import Batch
from phase1_kv_pool.cache import KVCache
from phase2_prefill_decode.kernels.attention import AttentionMetadata


@dataclass(frozen=True, slots=True)
class Packed:
    """The input of the model for one step. There is no padding: T tokens are T rows."""

    tokens: Tensor  # [tokens] int64
    positions: Tensor  # [tokens] int64, of each token in its sequence
    slots: Tensor  # [tokens] int64, where its key and value are stored
    metadata: AttentionMetadata
    last: Tensor | None  # [rows] int64, the rows that need logits, see `pack`; None: all of them, in order


def pack(batch: Batch, cache: KVCache, device: torch.device, scored: Sequence[int] = ()) -> Packed:
    """Pack a batch into tensors, with one copy to the device. Logits are computed for the last row of each slice that
    completes its request, then for the first scored[i] rows of each slice i."""
    tokens: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    cu_seqlens_q, last = [0], []
    # region exercise 2.3
    for piece in batch.slices:
        tokens += piece.request.tokens(piece.start, piece.stop)
        positions += range(piece.start, piece.stop)
        slots += cache.slots(piece)
        cu_seqlens_q.append(len(tokens))
        if piece.completes:
            last.append(len(tokens) - 1)
    # endregion
    for start, count in zip(cu_seqlens_q, scored, strict=False):
        last += range(start, start + count)
    seq_lens = [piece.stop for piece in batch.slices]
    max_pages = -(-max(seq_lens) // cache.page_size)
    page_table = np.zeros((len(seq_lens), max_pages), np.int32)
    for row, piece in zip(page_table, batch.slices, strict=True):
        pages = cache.table(piece.request)[:max_pages]
        row[: len(pages)] = pages
    rows = len(tokens)
    wide = torch.from_numpy(np.array(tokens + positions + slots + last, np.int64))
    narrow = torch.from_numpy(np.concatenate((np.array(cu_seqlens_q + seq_lens, np.int32), page_table.ravel())))
    wide, narrow = _to_device(wide, narrow, device)
    by_token, counts = wide[: 3 * rows].view(3, rows), len(cu_seqlens_q) + len(seq_lens)
    return Packed(
        tokens=by_token[0],
        positions=by_token[1],
        slots=by_token[2],
        metadata=AttentionMetadata(
            cu_seqlens_q=narrow[: len(cu_seqlens_q)],
            seq_lens=narrow[len(cu_seqlens_q) : counts],
            page_table=narrow[counts:].view(len(seq_lens), max_pages),
            max_seqlen_q=max(piece.length for piece in batch.slices),
            max_seqlen_k=max(seq_lens),
            sizes=tuple((piece.length, piece.stop) for piece in batch.slices),
        ),
        last=None if len(last) == rows and not any(scored) else wide[3 * rows :],
    )


def _to_device(wide: Tensor, narrow: Tensor, device: torch.device) -> Sequence[Tensor]:
    """Copy both to the device. On a GPU they go in one transfer from pinned memory."""
    if device.type == "cpu":
        return wide, narrow
    whole = torch.cat((wide.view(torch.int32), narrow)).pin_memory().to(device, non_blocking=True)
    return whole[: 2 * len(wide)].view(torch.int64), whole[2 * len(wide) :]

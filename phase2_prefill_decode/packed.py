"""Packed: a step as the model takes it. The tokens of all slices in one row, and tensors that say whose they are."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from phase0_request.batch import Batch
from phase1_kv_pool.cache import KVCache
from phase2_prefill_decode.kernels.attention import Ragged


@dataclass(frozen=True, slots=True)
class Packed:
    """Everything about one step that the model has to know. There is no padding: T tokens are T rows."""

    tokens: Tensor  # [tokens] int64
    positions: Tensor  # [tokens] int64, each in its own sequence
    slots: Tensor  # [tokens] int64, where its key and value go
    ragged: Ragged
    last: Tensor | None  # [wanted] int64, the rows whose logits are wanted, see `pack`; None: all of them, in order


def pack(batch: Batch, cache: KVCache, device: torch.device, scored: Sequence[int] = ()) -> Packed:
    """Lay a batch out, in one buffer and so in one copy to the device. Logits are wanted of the last row of each slice
    that completes, and after those, of the first scored[i] rows of slice i."""
    tokens: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    starts, last = [0], []
    # region exercise 2.3
    for piece in batch.slices:
        tokens += piece.request.tokens(piece.start, piece.stop)
        positions += range(piece.start, piece.stop)
        slots += cache.slots(piece)
        starts.append(len(tokens))
        if piece.completes:
            last.append(len(tokens) - 1)
    # endregion
    for start, count in zip(starts, scored, strict=False):
        last += range(start, start + count)
    lengths = [piece.stop for piece in batch.slices]
    longest = max(lengths)
    most_pages = -(-longest // cache.page_size)
    pages = np.zeros((len(lengths), most_pages), np.int32)
    for row, piece in zip(pages, batch.slices, strict=True):
        table = cache.table(piece.request)[:most_pages]
        row[: len(table)] = table
    rows = len(tokens)
    wide = torch.from_numpy(np.array(tokens + positions + slots + last, np.int64))
    narrow = torch.from_numpy(np.concatenate((np.array(starts + lengths, np.int32), pages.ravel())))
    wide, narrow = _together(wide, narrow, device)
    first, counts = wide[: 3 * rows].view(3, rows), len(starts) + len(lengths)
    return Packed(
        tokens=first[0],
        positions=first[1],
        slots=first[2],
        ragged=Ragged(
            starts=narrow[: len(starts)],
            lengths=narrow[len(starts) : counts],
            pages=narrow[counts:].view(len(lengths), most_pages),
            longest_query=max(piece.length for piece in batch.slices),
            longest=longest,
            sizes=tuple((piece.length, piece.stop) for piece in batch.slices),
        ),
        last=None if len(last) == rows and not any(scored) else wide[3 * rows :],
    )


def _together(wide: Tensor, narrow: Tensor, device: torch.device) -> Sequence[Tensor]:
    """Both on the device. On a GPU they travel in one piece, from memory it can read by itself."""
    if device.type == "cpu":
        return wide, narrow
    whole = torch.cat((wide.view(torch.int32), narrow)).pin_memory().to(device, non_blocking=True)
    return whole[: 2 * len(wide)].view(torch.int64), whole[2 * len(wide) :]

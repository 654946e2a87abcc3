"""PackedStep: one step as lists of integers on the host. `StepTensors` is the same step on the device.

The tokens of all slices are in one row, without padding. One copy takes all lists to the device. `DeviceState` adds
the data that is there already: page tables, and tokens that the host has not seen yet.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from phase0_request.batch import Batch, Slice
from phase1_kv_pool.cache import PagedCache
from phase2_prefill_decode.sampling.processors import Work
from phase2_prefill_decode.sampling.sampler import NO_COLUMNS, Columns
from phase2_prefill_decode.transfer import moved


class PackedStep(NamedTuple):
    """One step on the host: lists of integers, and the parameters and work of the sampler."""

    tokens: list[int]  # -1 - row: the newest token of this row, which the host does not know yet
    positions: list[int]
    slots: list[int]
    last: list[int]  # rows that need logits or hidden states
    newest_rows: list[int]  # the rows of the device state that get the drawn tokens
    changed: list[int]  # the entries of page tables that have changed, counted from the first of the first row
    cu_seqlens_q: list[int]
    seq_lens: list[int]
    table_rows: list[int]  # where the page table of each slice is in the device state
    pages: list[int]  # what the changed entries are now
    sizes: tuple[tuple[int, int], ...]  # (new tokens, all tokens) of each slice; (): the host may not rely on them
    max_seqlen_q: int
    max_seqlen_k: int
    all_logits: bool  # whether `last` is all rows, in order
    slice_numbers: tuple[int, ...] = ()  # for each row that draws a token, the index of its slice
    slices: int = 0
    columns: Columns = NO_COLUMNS  # the parameters of the draws
    works: Sequence[Work] = ()  # what else its requests ask for: in most steps nothing
    graph_size: int = 0  # the recorded step that it is padded for; 0: it is launched kernel by kernel

    @classmethod
    def empty(cls) -> "PackedStep":
        """A step without slices."""
        return cls([], [], [], [], [], [], [0], [], [], [], (), 1, 0, all_logits=True)

    @property
    def in_flight(self) -> bool:
        """Whether there may be tokens that the host does not know yet."""
        return not self.sizes or any(self.tokens[row] < 0 for row in self.last)

    @property
    def arrays(self) -> list[NDArray[Any]]:
        """The arrays that go to the device, those of 64 bits first, with the columns of the sampling inputs among
        them."""
        wide = self.tokens, self.positions, self.slots, self.last, self.newest_rows, self.changed
        narrow = self.cu_seqlens_q, self.seq_lens, self.table_rows, self.pages
        keys, positions, *filters = self.columns
        of_64_bits, of_32_bits = [np.array(p, np.int64) for p in wide], [np.array(p, np.int32) for p in narrow]
        return [*of_64_bits, keys, positions, *of_32_bits, *filters]

    def to(self, device: torch.device) -> list[Tensor]:
        """The arrays as tensors, by one copy to the device. On a CPU nothing is copied."""
        arrays = self.arrays
        return [*map(torch.from_numpy, arrays)] if device.type == "cpu" else split(moved(join(arrays), device), arrays)

    # region exercise 7.3
    def padded(self, size: int, scratch_row: int, scratch_entry: int, context: int, changes: int) -> "PackedStep":
        """A step of decodes, padded to `size` slices with some that read and write nothing, and to `changes`. What the
        host knows of it does not depend on the sequences, as a recorded step requires."""
        more, changes = size - len(self.tokens), changes - len(self.changed)
        columns = tuple(np.concatenate((c, np.zeros(size - len(c), c.dtype))) for c in self.columns)
        return self._replace(
            tokens=self.tokens + [0] * more,
            positions=self.positions + [0] * more,
            slots=self.slots + [-1] * more,
            last=[*range(size)],
            newest_rows=self.newest_rows + [scratch_row] * more,
            changed=self.changed + [scratch_entry] * changes,
            cu_seqlens_q=[*range(size + 1)],
            seq_lens=self.seq_lens + [0] * more,
            table_rows=self.table_rows + [scratch_row] * more,
            pages=self.pages + [0] * changes,
            sizes=(),
            max_seqlen_k=context,
            columns=columns,
            graph_size=size,
        )

    # endregion


def join(arrays: Sequence[NDArray[Any]]) -> Tensor:
    """The arrays of a step one after the other: [numbers] int32."""
    return torch.from_numpy(np.concatenate([each.view(np.int32) for each in arrays]))


def split(array: Tensor, arrays: Sequence[NDArray[Any]]) -> list[Tensor]:
    """The arrays as views of that array."""
    views = array.split_with_sizes([each.nbytes // 4 for each in arrays])
    return [view.view(getattr(torch, each.dtype.name)) for view, each in zip(views, arrays, strict=True)]


def pack(
    batch: Batch, cache: PagedCache, width: int, columns: Columns = NO_COLUMNS, works: Sequence[Work] = ()
) -> PackedStep:
    """Pack a batch: the tokens of its slices one after the other, without padding.

    A slice that reaches the newest token of its request draws a token from its last row, or from its last `draws` rows
    if it also has tokens beyond the request. `numbers` has the slice of each row that draws. `columns` and `works` are
    what the sampler has packed; `width` is the number of entries of a page table on the device.
    """
    tokens: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    last: list[int] = []
    numbers: list[int] = []
    cu_seqlens_q, seq_lens = [0], []
    for number, part in enumerate(batch.slices):
        request, start, length, beyond = part
        draws = min(1 + len(beyond), length)
        # region exercise 2.2
        tokens += tokens_of(part, cache)
        positions += range(start, start + length)
        slots += cache.slots(part)
        cu_seqlens_q.append(len(tokens))
        seq_lens.append(start + length)
        if start + length >= request.total:
            last += range(len(tokens) - draws, len(tokens))
            numbers += [number] * draws
        # endregion
    more = [row for work in works for row in work.rows]
    last += more
    rows = [cache.row(part.request) for part in batch.slices]
    changed: list[int] = []
    pages: list[int] = []
    for row, first, entries in cache.changes():
        changed += range(row * width + first, row * width + first + len(entries))
        pages += entries
    lengths = [part.length for part in batch.slices]
    return PackedStep(
        tokens=tokens,
        positions=positions,
        slots=slots,
        last=last,
        newest_rows=[rows[number] for number in numbers],
        changed=changed,
        cu_seqlens_q=cu_seqlens_q,
        seq_lens=seq_lens,
        table_rows=rows,
        pages=pages,
        sizes=tuple(zip(lengths, seq_lens, strict=True)),
        max_seqlen_q=max(lengths),
        max_seqlen_k=max(seq_lens),
        all_logits=len(last) == len(tokens) and not more,
        slice_numbers=tuple(numbers),
        slices=len(rows),
        columns=columns,
        works=works,
    )


# region exercise 7.1
def tokens_of(part: Slice, cache: PagedCache) -> list[int]:
    """The tokens of a slice. If a step in flight yields the last one, the host does not know it: it gets -1 - row."""
    request, start, length, beyond = part
    total, stop = request.total, start + length
    if length == 1 and stop == total and request.output_tokens:  # a decode
        return request.output_tokens[-1:]
    known = request.tokens(start, min(stop, total)) if start < total else []
    if stop > total:
        known += beyond[max(start - total, 0) : stop - total] if beyond else [-1 - cache.row(request)]
    return known


# endregion

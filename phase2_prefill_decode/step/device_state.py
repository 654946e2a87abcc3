"""DeviceState: the data that stays on the device between steps, for each live request its page table and newest token.

A step brings only what has changed. It can be launched while the previous one is still running, because the token that
it needs is read on the device, where that step writes it.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from phase1_kv_pool.cache import PagedCache
from phase2_prefill_decode.decoder import StepTensors
from phase2_prefill_decode.kernels.attention import AttentionMetadata
from phase2_prefill_decode.kernels.draw import SamplingInputs
from phase2_prefill_decode.step.packed import PackedStep


class DeviceState:
    """Page tables and newest tokens, in rows. One row more is scratch, for padding.

    The PagedCache assigns the rows. Both dimensions grow as needed, unless `rows` and `pages` were given: then the
    tensors stay where they are, as a recorded step needs.
    """

    changes = 2  # entries of page tables that may change in a recorded step, for each slice

    def __init__(self, device: torch.device, rows: int = 0, pages: int = 0) -> None:
        self.fixed = rows > 0
        self.page_table = torch.zeros(rows + 1, max(pages, 1), dtype=torch.int32, device=device)
        self.newest = torch.zeros(rows + 1, dtype=torch.int64, device=device)

    @property
    def width(self) -> int:
        return self.page_table.shape[1]

    @property
    def scratch_row(self) -> int:
        return len(self.newest) - 1

    def reserve(self, cache: PagedCache) -> None:
        """Make room for the page tables of a cache."""
        if not cache.changed:
            return
        rows = max((row + 1 for row, _, _ in cache.changes()), default=0)
        pages = max((first + len(pages) for _, first, pages in cache.changes()), default=0)
        old_rows, old_pages = self.page_table.shape
        if rows < old_rows and pages <= old_pages:
            return
        if self.fixed:
            raise RuntimeError(f"a step needs {rows} rows of {pages} pages; there are {old_rows - 1} of {old_pages}")
        more_rows = max(rows + 1 - old_rows, old_rows) if rows >= old_rows else 0
        more_pages = max(pages - old_pages, old_pages) if pages > old_pages else 0
        self.page_table = pad(self.page_table, (0, more_pages, 0, more_rows))
        self.newest = pad(self.newest, (0, more_rows))

    def load(self, step: PackedStep, arrays: Sequence[Tensor]) -> StepTensors:
        """Complete a step, given its arrays on the device: store its changes and add missing inputs."""
        tokens, positions, slots, last, newest_rows, changed, keys, places, *narrow = arrays
        cu_seqlens_q, seq_lens, rows, pages, *filters = narrow
        # region exercise 7.2
        if step.changed:
            self.page_table.view(-1).index_copy_(0, changed, pages)
        if step.in_flight:
            tokens = torch.where(tokens < 0, self.newest[(-1 - tokens).clamp_(min=0)], tokens)
        table = self.page_table.index_select(0, rows)
        # endregion
        metadata = AttentionMetadata(cu_seqlens_q, seq_lens, table, step.max_seqlen_q, step.max_seqlen_k, step.sizes)
        drawn = None if step.all_logits else last, newest_rows, SamplingInputs(keys, places, *filters)
        return StepTensors(tokens, positions, slots, metadata, *drawn, rows)

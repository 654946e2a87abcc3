"""StatefulRunner: runs steps of a model in which some layers keep a state of each request in place of pages.

A state is updated in place. It summarizes all tokens so far, and the next step reads nothing else. So a step
cannot simply run again, as it can over pages. The runner notes where the state of each request is. A slice that begins
elsewhere, because a step failed or was forgotten, or because its prefix was cached, begins with a copy of the last
checkpoint before it, and the tokens after that are computed again; without checkpoints, all tokens before it are.
"""

from collections.abc import Iterator, Sequence
from copy import copy
from typing import Any, NamedTuple

import torch
from torch import Tensor

from phase0_request.batch import Batch, Slice
from phase0_request.support.checks import ConfigError
from phase1_kv_pool.cache import PagedCache
from phase1_kv_pool.extras.checkpoints import Checkpoints
from phase1_kv_pool.pool import KVPool
from phase2_prefill_decode.decoder import Decoder
from phase2_prefill_decode.extras.families.stateful import StatefulLayer, StateTensor
from phase2_prefill_decode.sampling.sampler import Sampler
from phase2_prefill_decode.step.device_state import DeviceState
from phase2_prefill_decode.step.graphs import Computed
from phase2_prefill_decode.step.packed import PackedStep, pack
from phase2_prefill_decode.step.runner import ModelRunner
from phase2_prefill_decode.transfer import moved

AGAIN = 512  # tokens of a step that computes a state again


class LayerState:
    """The states of one layer: tensors [rows, ...], in which each request has the row of its page table."""

    def __init__(self, tensors: Sequence[StateTensor], device: torch.device, slots: int = 0) -> None:
        self.tensors = [torch.zeros(1, *shape, dtype=getattr(torch, dtype), device=device) for shape, dtype in tensors]
        self.checkpoints = [tensor.new_empty(slots, *tensor.shape[1:]) for tensor in self.tensors]

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.tensors)

    def reserve(self, rows: int) -> None:
        """Make room for this many rows."""
        for number, old in enumerate(self.tensors):
            if rows > len(old):
                self.tensors[number] = old.new_zeros(rows, *old.shape[1:])
                self.tensors[number][: len(old)] = old

    def copy_to(self, slots: Tensor, rows: Tensor) -> None:
        for state, kept in zip(self.tensors, self.checkpoints, strict=True):
            kept.index_copy_(0, slots, state.index_select(0, rows))

    def copy_from(self, slot: int, row: int) -> None:
        for state, kept in zip(self.tensors, self.checkpoints, strict=True):
            state[row] = kept[slot]


class Cuts(NamedTuple):
    """Where the layers copy states within the sequences of a step, to slots of checkpoints."""

    places: list[tuple[int, int, int]]  # sequence, new tokens before the cut, slot; the cuts of a sequence in order
    sequences: Tensor  # [cuts] int64; the same on the device
    lengths: Tensor
    slots: Tensor


class StatefulRunner(ModelRunner):
    """A ModelRunner whose pool has the states of layers among its layers."""

    def __init__(
        self,
        decoder: Decoder,
        pool: KVPool,
        cache: PagedCache,
        sampler: Sampler,
        state: DeviceState | None = None,
        *,
        ahead: bool = False,
    ) -> None:
        self.checkpoints: Checkpoints | None = getattr(cache, "checkpoints", None)
        if cache.shares and self.checkpoints is None:
            raise ConfigError(
                "a state cannot be cut at a page: this model needs a CheckpointedPrefixCache, or a PagedCache"
            )
        slots = self.checkpoints.num_slots if self.checkpoints else 0
        paged, layers = iter(pool.layers), decoder.config.layers
        merged: list[Any] = [
            LayerState(layer.states(decoder.config), pool.device, slots)
            if isinstance(layer, StatefulLayer)
            else next(paged)
            for layer in layers
        ]
        self.states: list[LayerState] = [layer for layer in merged if isinstance(layer, LayerState)]
        pool = copy(pool)
        pool.layers = merged
        super().__init__(decoder, pool, cache, sampler, state, ahead=ahead)
        self._at: dict[int, tuple[list[int], int]] = {}  # by row: the page table, and how many tokens are in the state
        self._within: list[tuple[int, int, int]] = []  # the cuts of a step that is packed and not yet launched
        self._after: list[tuple[int, int]] = []  # slots and rows to copy after it
        self._reserve()

    def pack(self, batch: Batch) -> PackedStep:
        self._within, self._after = [], []
        for part in batch.slices:
            if part.beyond:
                raise ConfigError(f"request {part.request.id} has drafted tokens, which a state cannot give back")
            table, tokens = self._at.get(self.cache.row(part.request), ([], 0))
            if part.start and (table is not self.cache.table(part.request) or tokens != part.start):
                self._restore(part)
        step = super().pack(batch)
        self._reserve()
        for number, part in enumerate(batch.slices):
            row = self.cache.row(part.request)
            self._at[row] = self.cache.table(part.request), part.stop
            for tokens, slot in self.checkpoints.take(part) if self.checkpoints else ():
                if tokens == part.stop:
                    self._after.append((slot, row))
                else:
                    self._within.append((number, tokens - part.start, slot))
        return step

    def forward(self, step: PackedStep) -> Computed:
        computed = super().forward(step)
        if self._after:
            slots, rows = moved(torch.tensor(self._after).T.contiguous(), self.pool.device)
            for layer in self.states:
                layer.copy_to(slots, rows)
        return computed

    def compute(self, step: PackedStep, arrays: Sequence[Tensor], out: Tensor | None = None) -> Computed:
        tensors = self.state.load(step, arrays)
        if self._within:
            columns = moved(torch.tensor(self._within).T.contiguous(), self.pool.device)
            tensors.metadata.plans[Cuts] = Cuts(self._within, *columns)
        return Computed(tensors, *self.decoder(tensors, self.pool.layers, out))

    def _restore(self, part: Slice) -> None:
        """Bring the state to where a slice begins, from the last checkpoint before it. The keys and values that are
        computed with it are the same as before."""
        first, table, row = 0, self.cache.table(part.request), self.cache.row(part.request)
        if self.checkpoints is not None:
            pages = self.checkpoints.usable(table[: part.start // self.cache.page_size])
            self.state.reserve(self.cache)
            self._reserve()
            for layer in self.states if pages else ():
                layer.copy_from(self.checkpoints.use(table[pages - 1]), row)
            first = pages * self.cache.page_size
        counts = [
            (layer.mlp.ends, layer.mlp.ends.clone()) for layer in self.decoder.layers if hasattr(layer.mlp, "ends")
        ]
        for start in range(first, part.start, AGAIN):
            self.state.reserve(self.cache)
            again = Slice(part.request, start, min(AGAIN, part.start - start))
            step = pack(Batch((again,)), self.cache, self.state.width)
            self._reserve()
            self.compute(step, step.to(self.pool.device))
            self.cache.copied()
        for ends, before in counts:  # a record has yet to read the counts of the step in flight
            ends.copy_(before)

    def _reserve(self) -> None:
        """A row of states for each row of the device state."""
        rows = len(self.state.newest)
        for layer in self.states:
            layer.reserve(rows)


def rows_of(states: Tensor, rows: Tensor, fresh: Tensor) -> Tensor:
    """The states of some rows; zeros where the request has just begun, whatever another has left there."""
    found = states.index_select(0, rows)
    return found.masked_fill(fresh.view(-1, *[1] * (found.dim() - 1)), 0)

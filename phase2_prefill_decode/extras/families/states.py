"""StatefulRunner: runs steps of a model in which some layers keep a state of each request in place of pages.

A state is updated in place. It summarizes all tokens so far, and the next step reads nothing else. So a step
cannot simply run again, as it can over pages. The runner notes where the state of each request is. A slice that begins
elsewhere, because a step failed or was forgotten, has its state computed again first, from the request's start.
"""

from collections.abc import Iterator, Sequence
from copy import copy
from typing import Any

import torch
from torch import Tensor

from phase0_request.batch import Batch, Slice
from phase0_request.support.checks import ConfigError
from phase1_kv_pool.cache import PagedCache
from phase1_kv_pool.pool import KVPool
from phase2_prefill_decode.decoder import Decoder
from phase2_prefill_decode.extras.families.stateful import StatefulLayer, StateTensor
from phase2_prefill_decode.sampling.sampler import Sampler
from phase2_prefill_decode.step.device_state import DeviceState
from phase2_prefill_decode.step.packed import PackedStep, pack
from phase2_prefill_decode.step.runner import ModelRunner

AGAIN = 512  # tokens of a step that computes a state again


class LayerState:
    """The states of one layer: tensors [rows, ...], in which each request has the row of its page table."""

    def __init__(self, tensors: Sequence[StateTensor], device: torch.device) -> None:
        self.tensors = [torch.zeros(1, *shape, dtype=getattr(torch, dtype), device=device) for shape, dtype in tensors]

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.tensors)

    def reserve(self, rows: int) -> None:
        """Make room for this many rows."""
        for number, old in enumerate(self.tensors):
            if rows > len(old):
                self.tensors[number] = old.new_zeros(rows, *old.shape[1:])
                self.tensors[number][: len(old)] = old


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
        if cache.shares:
            raise ConfigError("a state cannot be cut at a page: this model needs a cache that shares no prefixes")
        paged, layers = iter(pool.layers), decoder.config.layers
        merged: list[Any] = [
            LayerState(layer.states(decoder.config), pool.device) if isinstance(layer, StatefulLayer) else next(paged)
            for layer in layers
        ]
        self.states: list[LayerState] = [layer for layer in merged if isinstance(layer, LayerState)]
        pool = copy(pool)
        pool.layers = merged
        super().__init__(decoder, pool, cache, sampler, state, ahead=ahead)
        self._at: dict[int, tuple[str, int]] = {}  # by row: the request, and how many of its tokens are in the state
        self._reserve()

    def pack(self, batch: Batch) -> PackedStep:
        for part in batch.slices:
            if part.beyond:
                raise ConfigError(f"request {part.request.id} has drafted tokens, which a state cannot give back")
            if part.start and self._at.get(self.cache.row(part.request)) != (part.request.id, part.start):
                self._compute_again(part)
        step = super().pack(batch)
        self._reserve()
        for request, start, length, _ in batch.slices:
            self._at[self.cache.row(request)] = request.id, start + length
        return step

    def _compute_again(self, part: Slice) -> None:
        """Compute the state before a slice. The keys and values of these tokens are computed with it; they are the same
        as before."""
        for start in range(0, part.start, AGAIN):
            self.state.reserve(self.cache)
            again = Slice(part.request, start, min(AGAIN, part.start - start))
            step = pack(Batch((again,)), self.cache, self.state.width)
            self._reserve()
            self.compute(step, step.to(self.pool.device))
            self.cache.copied()

    def _reserve(self) -> None:
        """A row of states for each row of the device state."""
        rows = len(self.state.newest)
        for layer in self.states:
            layer.reserve(rows)


def rows_of(states: Tensor, rows: Tensor, fresh: Tensor) -> Tensor:
    """The states of some rows; zeros where the request has just begun, whatever another has left there."""
    found = states.index_select(0, rows)
    return found.masked_fill(fresh.view(-1, *[1] * (found.dim() - 1)), 0)

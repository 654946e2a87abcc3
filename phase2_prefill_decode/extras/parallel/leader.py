"""Leader: rank 0's runner. The other ranks run each step with it.

Each rank has a `ModelRunner` with its part of the model and of the KV pool. Rank 0 packs a step and sends it to all.
Only rank 0 has requests, the scheduler, page tables on the host, and the sampler.
"""

from collections.abc import Sequence
from weakref import ref

import torch
from torch import Tensor

from phase0_request.support.memory import free_bytes
from phase1_kv_pool.cache import PagedCache
from phase1_kv_pool.pool import KVPool
from phase2_prefill_decode.decoder import Decoder
from phase2_prefill_decode.extras.linears import Product
from phase2_prefill_decode.extras.parallel.ranks import Ranks
from phase2_prefill_decode.sampling.sampler import Sampler
from phase2_prefill_decode.step.device_state import DeviceState
from phase2_prefill_decode.step.graphs import Computed, Record
from phase2_prefill_decode.step.packed import PackedStep
from phase2_prefill_decode.step.runner import ModelRunner


# region leader
class Leader(ModelRunner):
    """Rank 0's runner. There is one at a time, because each other rank has one KV pool."""

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
        """The other ranks make theirs, which takes the place of the one they had."""
        super().__init__(decoder, pool, cache, sampler, state, ahead=ahead)
        ranks = decoder.processes
        assert isinstance(ranks, Ranks)
        self.ranks = ranks
        ranks.ask("build", decoder.config, pool.layout, pool.num_pages, self._shape)
        ranks.runner = ref(self)

    @property
    def _shape(self) -> tuple[int, ...]:
        """The size of the page tables on the device, which grow: rows of the other ranks' have the same places."""
        return tuple(self.state.page_table.shape)

    def forward(self, step: PackedStep) -> Computed:
        """Run the model, on all ranks."""
        if self.ranks.runner() is not self:
            raise RuntimeError(
                "another engine of this model has its keys and values on the other ranks, which have one KV pool; load "
                "the model again for a second engine"
            )
        self.ranks.tell("forward", step._replace(works=()), self._shape)
        with self.ranks.together():
            return super().forward(step)

    def record(self, sizes: Sequence[int], context: int, record: Record | None = None) -> None:
        """Each rank records its part of the steps, collectives included."""
        self.ranks.tell("record", sizes, context)
        with self.ranks.together():
            super().record(sizes, context, record)


# endregion


def shared(lm_head: Product, ranks: Ranks) -> Product:
    """lm_head for more rows of a step that has run, as for scored prompts. The other ranks have the same hidden
    states, so it sends them the range of rows."""

    def logits(rows: Tensor, out: Tensor | None = None) -> Tensor:
        if ranks.in_step:
            return lm_head(rows, out)
        ranks.tell("logits", rows.storage_offset() // rows.shape[1], len(rows))
        with ranks.together():
            return lm_head(rows, out)

    return logits


def least_free(ranks: Ranks, device: torch.device) -> int | None:
    """The free memory, beside the weights, of the rank that has the least."""
    own, ranks.runner = free_bytes(device), lambda: None
    known = [free for free in (own, *ranks.ask("free_bytes")) if free is not None]
    sharing = ranks.size if device.type == "cpu" else 1
    return min(known) // sharing if known else None

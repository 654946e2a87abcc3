"""Leader: rank 0's decoder. It looks like the decoder of one device; each step is sent to the other ranks first.

What is sent is the whole input of the model: tokens, positions, slots, and the pages of each sequence, as one tensor
of integers. So the other ranks keep nothing between steps but keys and values. Scheduling, sampling, page tables and
tokens in flight exist once, here.
"""

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from phase0_request.support.memory import free_bytes
from phase1_kv_pool.layer import KVLayer
from phase1_kv_pool.layout import DTYPE_BYTES, KV_DTYPES, KVLayout
from phase1_kv_pool.pool import KVPool
from phase2_prefill_decode.backend import Backend, Record
from phase2_prefill_decode.decoder import StepTensors
from phase2_prefill_decode.extras.linears import Product, Wrapped
from phase2_prefill_decode.extras.parallel.group import Group
from phase2_prefill_decode.extras.parallel.layers import ParallelDecoder
from phase2_prefill_decode.extras.parallel.ranks import Ranks
from phase2_prefill_decode.extras.parallel.shard import Shard, load_part
from phase2_prefill_decode.extras.quantized.at_load import Quantization
from phase2_prefill_decode.kernels.attention import AttentionMetadata
from phase2_prefill_decode.kernels.draw import SamplingInputs
from phase2_prefill_decode.loading.config import ModelConfig
from phase2_prefill_decode.loading.weights import Weights

POOL, HIDDEN, LOGITS, FREE, RECORD, REPLAY = range(6)  # commands
NO_ROWS = -1  # in place of a number of rows: logits of all
DTYPES = [*DTYPE_BYTES, *KV_DTYPES]  # of keys and values


class Leader(ParallelDecoder):
    """Rank 0's decoder. Its steps run on all ranks, for one engine at a time: another rank has one KV pool."""

    def __init__(self, shard: Shard, weights: Weights, group: Group, ranks: Ranks, backend: Backend) -> None:
        super().__init__(shard, weights, group, backend)
        self.ranks = self.processes = ranks
        self.lm_head = Wrapped(self.lm_head, self._announced)
        self.backend = replace(
            self.backend, kv_pool=self.kv_pool, free_bytes=self.free_bytes, recorder=self.on_all_ranks
        )
        self._recorded = 0  # steps that the other ranks have

    def kv_pool(self, layout: KVLayout, pages: int, device: torch.device) -> KVPool:
        """A pool on each rank. It takes the place of the one that another rank has."""
        pool = KVPool(layout, pages, device)
        self.ranks.command([POOL, pages, layout.page_size, DTYPES.index(layout.dtype)])
        self.ranks.replies()
        self.ranks.keys = ref(pool.layers[0].keys)
        return pool

    # region hidden
    @torch.inference_mode()
    def hidden(self, step: StepTensors, pool: Sequence[KVLayer]) -> Tensor:
        """One step up to `lm_head`, on all ranks."""
        if pool[0].keys is not self.ranks.keys():
            raise RuntimeError(
                "another engine of this model has its keys and values on the other ranks, which have one KV pool; load "
                "the model again for a second engine"
            )
        self.ranks.command([HIDDEN, len(self.layers), *sizes_of(step)])
        with self.ranks.together():
            self.group.broadcast(joined(step))
            return super().hidden(step, pool)

    # endregion

    def _announced(self, product: Product) -> Product:
        """Send the range of rows to the other ranks, which have the same hidden states, before computing logits."""

        def logits(rows: Tensor, out: Tensor | None = None) -> Tensor:
            self.ranks.command([LOGITS, rows.storage_offset() // rows.shape[1], len(rows)])
            with self.ranks.together():
                return product(rows, out)

        return logits

    def on_all_ranks(self, record: Record) -> Record:
        """Each rank records its own part, collectives included. To launch it, rank 0 sends its number."""

        def record_all(run: Callable[[], Any]) -> Callable[[], Any]:
            number, self._recorded = self._recorded, self._recorded + 1
            self.ranks.command([RECORD])
            own = record(run)

            def replay() -> Any:
                self.ranks.command([REPLAY, number])
                with self.ranks.together():
                    return own()

            return replay

        return record_all

    def free_bytes(self, device: torch.device) -> int | None:
        """The least memory that any rank has free, beside its weights."""
        own, self._recorded, self.ranks.keys = free_bytes(device), 0, lambda: None
        self.ranks.command([FREE])
        all_free = [own, *self.ranks.replies()]
        known = [free for free in all_free if free is not None]
        shared = self.ranks.size if device.type == "cpu" else 1  # by all ranks
        return min(known) // shared if known else None


# region packed
def sizes_of(step: StepTensors) -> list[int]:
    """What the host must know to receive a step and to run it."""
    metadata = step.metadata
    rows = NO_ROWS if step.last is None else len(step.last)
    lengths = [number for sizes in metadata.sizes for number in sizes]
    return [len(step.tokens), rows, *metadata.page_table.shape, metadata.max_seqlen_q, metadata.max_seqlen_k, *lengths]


def joined(step: StepTensors) -> Tensor:
    """The tensors of a step that the model reads, one after the other: [numbers] int32, on the device."""
    metadata = step.metadata
    last = [] if step.last is None else [step.last]
    of_64_bits = torch.cat([step.tokens, step.positions, step.slots, *last])
    return torch.cat(
        [of_64_bits.view(torch.int32), metadata.cu_seqlens_q, metadata.seq_lens, metadata.page_table.flatten()]
    )


def received(sizes: Sequence[int], device: torch.device, receive: Callable[[Tensor], Tensor]) -> StepTensors:
    """The same step on another rank."""
    tokens, rows, sequences, width, max_seqlen_q, max_seqlen_k, *lengths = sizes
    wide, narrow = [tokens] * 3 + [max(rows, 0)], [sequences + 1, sequences, sequences * width]
    counts = [2 * count for count in wide] + narrow
    array = receive(torch.empty(sum(counts), dtype=torch.int32, device=device))
    *of_64_bits, cu_seqlens_q, seq_lens, table = array.split_with_sizes(counts)
    ids, positions, slots, last = (each.view(torch.int64) for each in of_64_bits)
    pairs = tuple(zip(lengths[::2], lengths[1::2], strict=True))
    table = table.view(sequences, width)
    metadata = AttentionMetadata(cu_seqlens_q, seq_lens, table, max_seqlen_q, max_seqlen_k, pairs)
    nothing = ids[:0]  # is drawn here
    inputs = SamplingInputs(*[nothing] * 6)
    return StepTensors(ids, positions, slots, metadata, None if rows == NO_ROWS else last, nothing, inputs)


# endregion


def lead(
    directory: str | Path,
    config: ModelConfig,
    device: torch.device,
    size: int,
    kv_cache_dtype: str | None,
    timeout: float,
    backend: Backend,
    transform: Quantization | None,
    *,
    progress: bool = False,
) -> Leader:
    """Start the other ranks, load this one's part while they load theirs, and meet."""
    shard, group = Shard(config, 0, size), Group(0, size)
    with tempfile.TemporaryDirectory() as folder:
        file, threads = f"{folder}/meeting", torch.get_num_threads()
        form = None if transform is None else asdict(transform)
        model = {"directory": str(directory), "dtype": config.dtype, "device": device.type, "transform": form}
        more = {"kv_cache_dtype": kv_cache_dtype, "threads": threads, "file": file, "timeout": timeout}
        ranks = Ranks({**model, **more}, size)
        try:
            weights = load_part(directory, shard, device, transform, progress=progress)
            leader = Leader(shard, weights, group, ranks, backend)
            backend.compile(leader, kv_cache_dtype, progress)
            ranks.command([])  # the kernels are compiled, once for all
            ranks.replies()
            with ranks.together():
                group.connect(file, timeout, device)
                ranks.replies()
        except BaseException:
            ranks.close()
            raise
    return leader

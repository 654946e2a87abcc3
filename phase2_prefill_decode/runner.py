"""ModelRunner: runs a batch of slices through the model, and samples a token for each slice that completes."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from phase0_request.batch import Batch, StepOutput
from phase1_kv_pool.cache import KVCache
from phase1_kv_pool.pool import KVPool
from phase2_prefill_decode.decoder import Decoder
from phase2_prefill_decode.device_state import DeviceState
from phase2_prefill_decode.graphs import DecodeGraphs, Graph, Record
from phase2_prefill_decode.logprobs import PromptTargets, pack_prompt_targets, prompt_logprobs_of
from phase2_prefill_decode.packed import HostStep, Packed, pack
from phase2_prefill_decode.sampler import Fetched, Sampler
from phase2_prefill_decode.sampling import SamplingMetadata, pinned


@dataclass(frozen=True, slots=True)
class PackedStep:
    """A batch as integers, with what its requests ask of the sampler."""

    host: HostStep
    graph: Graph | None  # that holds it; None: it is launched kernel by kernel
    sampling: SamplingMetadata
    drawn: tuple[int, ...]  # the numbers of the slices that complete
    slices: int
    prompt: PromptTargets | None = None


class ModelRunner:
    """Runs steps of one model over one pool, in any mixture of slices."""

    def __init__(
        self,
        decoder: Decoder,
        pool: KVPool,
        cache: KVCache,
        sampler: Sampler,
        state: DeviceState | None = None,
        *,
        ahead: bool = False,
    ) -> None:
        """With `ahead`, a step may be launched before the tokens of the one before it are known."""
        self.decoder = decoder
        self.pool = pool
        self.cache = cache
        self.sampler = sampler
        self.state = state or DeviceState(pool.device)
        self.ahead = ahead
        self.graphs: DecodeGraphs | None = None

    def pack(self, batch: Batch) -> PackedStep:
        """Collect what the device needs to know. The pages of a batch must be allocated: `cache.grow` comes first."""
        self.state.reserve(self.cache)
        prompt = pack_prompt_targets(batch, self.pool.device)
        host = pack(batch, self.cache, self.state.width, prompt.counts if prompt else ())
        pieces = [batch.slices[number] for number in host.completed]
        sampling = self.sampler.pack([piece.request for piece in pieces], [piece.stop for piece in pieces])
        graph = self.graphs.graph_for(host) if self.graphs is not None else None
        if self.graphs is not None and graph is not None:
            host = self.graphs.pad(host, graph.size)
        return PackedStep(host, graph, sampling, host.completed, len(batch.slices), prompt)

    def record(self, sizes: Sequence[int], context: int, record: Record | None = None) -> None:
        """Record decode steps of these sizes, of sequences of up to `context` tokens; by default as CUDA graphs."""
        self.graphs = DecodeGraphs(self.state, self.cache.page_size, context)
        self.graphs.record(self.compute, sizes, record)

    # region run
    def launch(self, step: PackedStep) -> Fetched:
        """Run the model and sample. On a GPU this returns before the work is done."""
        if step.graph is None:
            packed, logits = self.compute(step.host, step.host.to(self.pool.device))
        else:
            step.graph.array.copy_(pinned(torch.from_numpy(step.host.array()), self.pool.device), non_blocking=True)
            packed, logits = step.graph.replay()
        self.cache.changed.clear()
        rows, edits = step.sampling.rows, step.sampling.edits
        newest = None
        if edits is not None and edits.in_flight is not None:
            newest = packed.tokens[:rows] if packed.last is None else packed.tokens[packed.last[:rows]]
        sampled = self.sampler.sample(logits[:rows], step.sampling, newest)
        if self.ahead:
            self.state.newest.index_copy_(0, packed.drawn[:rows], sampled.tokens)
        if step.prompt is not None:
            sampled = replace(sampled, prompt_logprobs=prompt_logprobs_of(logits[rows:], step.prompt))
        return sampled.fetch()

    def compute(self, step: HostStep, lists: Sequence[Tensor]) -> tuple[Packed, Tensor]:
        """Run the model on a step, given its lists on the device. Returns the logits [rows, vocab]."""
        packed = self.state.load(step, lists, self.cache.page_size)
        return packed, self.decoder(packed, self.pool.keys, self.pool.values)

    def run(self, step: PackedStep) -> StepOutput:
        """Run a step and wait for its tokens. A slice that does not complete its request has None."""
        return self.launch(step).output(step.drawn, step.slices)

    # endregion

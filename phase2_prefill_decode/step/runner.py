"""ModelRunner: runs a batch of slices through the model, and samples a token for each slice that completes."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from phase0_request.batch import Batch, StepOutput
from phase1_kv_pool.cache import PagedCache
from phase1_kv_pool.pool import KVPool
from phase2_prefill_decode.decoder import Decoder
from phase2_prefill_decode.sampling.sampler import Sampled, Sampler
from phase2_prefill_decode.step.device_state import DeviceState
from phase2_prefill_decode.step.graphs import Computed, DecodeGraphs, Record, cuda_recorder
from phase2_prefill_decode.step.launched import LaunchedStep
from phase2_prefill_decode.step.packed import PackedStep, StepTensors, pack


class Pieces(Protocol):
    """Computes some steps up to `lm_head`, in place of the decoder."""

    def takes(self, step: StepTensors) -> bool: ...

    def __call__(self, step: StepTensors) -> Tensor: ...


class ModelRunner:
    """Runs steps of one model over one pool, in any mixture of slices."""

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
        """With `ahead`, a step may be launched before the tokens of the one before it are known."""
        self.decoder = decoder
        self.pool = pool
        self.cache = cache
        self.sampler = sampler
        self.state = state or DeviceState(pool.device)
        self.ahead = ahead
        self.graphs: DecodeGraphs | None = None
        self.pieces: Pieces | None = None
        self._latest: LaunchedStep | None = None

    def pack(self, batch: Batch) -> PackedStep:
        """Collect what the device needs to know. The pages of a batch must be allocated: `cache.grow` comes first."""
        self.state.reserve(self.cache)
        sampling = self.sampler.pack(batch)
        step = pack(batch, self.cache, self.state.width, sampling)
        if self.graphs is not None and not sampling.wants_hidden and (size := self.graphs.size_for(step)):
            return self.graphs.pad(step, size)
        return step

    def record(self, sizes: Sequence[int], context: int, record: Record | None = None) -> None:
        """Record decode steps of these sizes, of sequences of up to `context` tokens; by default as CUDA graphs."""
        record = record or cuda_recorder()
        self._rope = self.decoder.rope(context)  # the graphs hold its addresses; the model may replace its own
        shape = max(sizes), self.decoder.config.vocab_size
        logits = torch.empty(shape, dtype=self.decoder.dtype, device=self.pool.device)  # one for all graphs

        def compute(step: PackedStep, arrays: Sequence[Tensor]) -> Computed:
            computed = self.compute(step, arrays, logits[: len(step.drawn_rows)])
            sampled = self.sampler.draw(computed.logits, computed.inputs)
            self.state.newest.index_copy_(0, computed.drawn_rows, sampled.tokens)
            return replace(computed, sampled=sampled)

        self.graphs = DecodeGraphs(self.state, self.cache.page_size, context)
        self.graphs.record(compute, sizes, self.decoder.backend.recorder(record))

    # region run
    def launch(self, step: PackedStep) -> LaunchedStep:
        """Run the model and sample. On a GPU this returns before the work is done. If processors depend on a token in
        flight, it waits for the step before, while the device runs this one."""
        works, in_flight = step.sampling.works, step.sampling.in_flight
        for work in () if in_flight else works:
            work.start()
        try:
            computed = self._forward(step)
            self.cache.copied()
            if in_flight and self._latest is not None:
                self._latest.output()
            sampled = (None if works else computed.sampled) or self.sample(step, computed)
        except BaseException:
            for work in works:
                work.cancel()
            raise
        self._latest = LaunchedStep(step, sampled)
        return self._latest

    def _forward(self, step: PackedStep) -> Computed:
        if self.graphs is not None and step.graph_size:
            return self.graphs.replay(step)
        return self.compute(step, step.to(self.pool.device))

    def compute(self, step: PackedStep, arrays: Sequence[Tensor], out: Tensor | None = None) -> Computed:
        """Run the model on a step, given its arrays on the device. A recorded step writes its logits to `out`."""
        tensors = self.state.load(step, arrays, self.cache.page_size)
        layers, lm_head, drawn = self.pool.layers, self.decoder.lm_head, len(step.drawn_rows)
        if out is not None:
            logits, hidden = lm_head(self.decoder.hidden(tensors, layers), out), None
        elif self.pieces is not None and self.pieces.takes(tensors):
            hidden = self.pieces(tensors)
            logits = lm_head(hidden[:drawn])
        elif step.sampling.wants_hidden:
            hidden = self.decoder.hidden(tensors, layers)
            logits = lm_head(hidden[:drawn])
        else:
            logits, hidden = self.decoder(tensors, layers), None
        return Computed(tensors.drawn_rows, tensors.inputs, logits, hidden)

    def sample(self, step: PackedStep, computed: Computed) -> Sampled:
        """Draw the tokens of a step, and let processors collect what they need beside."""
        rows, logits, hidden = step.sampling.rows, computed.logits, computed.hidden
        sampled = self.sampler.sample(logits[:rows], step.sampling, computed.inputs.first(rows))
        if self.ahead:
            self.state.newest.index_copy_(0, computed.drawn_rows[:rows], sampled.tokens)
        first = rows
        for work in step.sampling.works:
            own = None if hidden is None else hidden[first : first + len(work.rows)]
            work.collect(logits[:rows], sampled.tokens, None if hidden is None else hidden[:rows], own)
            first += len(work.rows)
        return sampled

    def run(self, step: PackedStep) -> StepOutput:
        """Run a step and wait for its tokens. A slice that does not complete its request has None."""
        return self.launch(step).output()

    # endregion

"""ModelRunner: runs a batch of slices through the model, and samples a token for each slice that completes."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from phase0_request.batch import NO_TOKEN_LEFT, Batch, StepOutput, WaitHandle
from phase1_kv_pool.cache import PagedCache
from phase1_kv_pool.pool import KVPool
from phase2_prefill_decode.decoder import Decoder
from phase2_prefill_decode.sampling.constraints import StepMasks
from phase2_prefill_decode.sampling.inputs import SamplingMetadata, pinned
from phase2_prefill_decode.sampling.logprobs import PromptTargets, pack_prompt_targets, prompt_logprobs_of
from phase2_prefill_decode.sampling.sampler import Fetched, Sampled, Sampler
from phase2_prefill_decode.step.device_state import DeviceState
from phase2_prefill_decode.step.graphs import Computed, DecodeGraphs, Graph, Record
from phase2_prefill_decode.step.packed import HostStep, pack


@dataclass(frozen=True, slots=True)
class PackedStep:
    """A batch as integers, with what its requests ask of the sampler."""

    host: HostStep
    graph: Graph | None  # that holds it; None: it is launched kernel by kernel
    sampling: SamplingMetadata
    slices: int
    prompt: PromptTargets | None = None

    @property
    def drawn(self) -> tuple[int, ...]:
        """The numbers of the slices that complete their requests."""
        return self.host.completed


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    """A step that may still be on the device. If some rows have masks, its tokens tell their constraints how the output
    goes on."""

    fetched: Fetched
    packed: PackedStep
    masks: StepMasks | None = None
    late: Mapping[int, WaitHandle] = field(default_factory=dict)  # by row

    def output(self) -> StepOutput:
        """Wait for the result. May be called repeatedly."""
        numbers = self.packed.drawn
        output = self.fetched.output(numbers, self.packed.slices)
        if self.masks is None:
            return output
        failed, forced, late, drawn = dict(output.failed), {}, {}, []
        for row, constraint, index in self.masks.rows:
            number = numbers[row]
            token = output.tokens[number]
            if row in self.late and failed.get(number) == NO_TOKEN_LEFT:  # its mask is empty
                late[number] = self.late[row]
                del failed[number]
            elif token is None:
                failed[number] = constraint.error or failed[number]
            else:
                constraint.take(index, token)
                drawn.append((number, constraint, index))
        for number, constraint, index in drawn:  # when all have been told of their tokens: they may work side by side
            follows = constraint.forced(index)
            if follows is not None:
                forced[number] = follows
        return replace(output, failed=failed, forced=forced, late=late)


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
        self._constrained: LaunchedStep | None = None  # the latest with masks

    def pack(self, batch: Batch) -> PackedStep:
        """Collect what the device needs to know. The pages of a batch must be allocated: `cache.grow` comes first."""
        self.state.reserve(self.cache)
        prompt = pack_prompt_targets(batch, self.pool.device)
        host = pack(batch, self.cache, self.state.width, prompt.counts if prompt else ())
        pieces = [batch.slices[number] for number in host.completed]
        sampling = self.sampler.pack([piece.request for piece in pieces], [piece.stop for piece in pieces])
        host = replace(host, params=sampling.params)
        graph = self.graphs.graph_for(host) if self.graphs is not None else None
        if self.graphs is not None and graph is not None:
            host = self.graphs.pad(host, graph.size)
        return PackedStep(host, graph, sampling, len(batch.slices), prompt)

    def record(self, sizes: Sequence[int], context: int, record: Record | None = None) -> None:
        """Record decode steps of these sizes, of sequences of up to `context` tokens; by default as CUDA graphs."""
        shape = max(sizes), self.decoder.config.vocab_size
        logits = torch.empty(shape, dtype=self.decoder.dtype, device=self.pool.device)  # one for all graphs
        self._rope = self.decoder.rope(context)  # whose addresses the graphs hold: the model's may be replaced

        def compute(step: HostStep, lists: Sequence[Tensor]) -> Computed:
            computed = self.compute(step, lists, logits[: len(step.drawn)])
            sampled = self.sampler.draw(computed.logits, computed.params)
            self.state.newest.index_copy_(0, computed.drawn, sampled.tokens)
            return replace(computed, sampled=sampled.gather())

        self.graphs = DecodeGraphs(self.state, self.cache.page_size, context)
        self.graphs.record(compute, sizes, record)

    # region run
    def launch(self, step: PackedStep) -> LaunchedStep:
        """Run the model and sample. On a GPU this returns before the work is done; with masks that depend on a token in
        flight, it waits for the step before, while the device runs this one."""
        masks = step.sampling.masks
        filling = masks.start() if masks is not None and not masks.in_flight else None
        try:
            computed = self._forward(step)
        except BaseException:
            if filling is not None:
                with suppress(Exception):  # the masks are filled no longer: their constraints may go back
                    filling.result()
            raise
        self.cache.changed.clear()
        if computed.sampled is not None and step.sampling.is_plain:
            return LaunchedStep(computed.sampled.fetch(), step)
        if masks is None:
            return LaunchedStep(self.sample(step, computed).fetch(), step)
        if filling is None and self._constrained is not None:
            self._constrained.output()
        bits, late = masks.filled() if filling is None else filling.result()
        self._constrained = LaunchedStep(self.sample(step, computed, bits).fetch(), step, masks, late)
        return self._constrained

    def _forward(self, step: PackedStep) -> Computed:
        if step.graph is None:
            return self.compute(step.host, step.host.to(self.pool.device))
        step.graph.array.copy_(pinned(torch.from_numpy(step.host.array()), self.pool.device), non_blocking=True)
        return step.graph.replay()

    def compute(self, step: HostStep, lists: Sequence[Tensor], out: Tensor | None = None) -> Computed:
        """Run the model on a step, given its lists on the device. A recorded step writes its logits to `out`."""
        packed = self.state.load(step, lists, self.cache.page_size)
        keys, values, drawn = self.pool.keys, self.pool.values, len(step.drawn)
        if out is not None:
            logits, scored = self.decoder.lm_head.into(out, self.decoder.hidden(packed, keys, values)), None
        elif drawn == len(step.last):
            logits, scored = self.decoder(packed, keys, values), None
        else:  # the logits of prompts are computed a few rows at a time
            hidden = self.decoder.hidden(packed, keys, values)
            logits, scored = self.decoder.lm_head(hidden[:drawn]), hidden[drawn:]
        return Computed(packed.tokens, packed.last, packed.drawn, packed.params, logits, scored)

    def sample(self, step: PackedStep, computed: Computed, bits: Tensor | None = None) -> Sampled:
        """Draw the tokens of a step."""
        tokens, last, logits, sampling = computed.tokens, computed.last, computed.logits, step.sampling
        rows, newest = sampling.rows, None
        if sampling.edits is not None and sampling.edits.in_flight is not None:
            newest = tokens[:rows] if last is None else tokens[last[:rows]]
        sampled = self.sampler.sample(logits[:rows], sampling, computed.params.first(rows), newest, bits)
        if self.ahead:
            self.state.newest.index_copy_(0, computed.drawn[:rows], sampled.tokens)
        if step.prompt is not None and computed.hidden is not None:  # both or neither
            scores = prompt_logprobs_of(computed.hidden, self.decoder.lm_head, step.prompt)
            sampled = replace(sampled, prompt_logprobs=scores)
        return sampled

    def run(self, step: PackedStep) -> StepOutput:
        """Run a step and wait for its tokens. A slice that does not complete its request has None."""
        return self.launch(step).output()

    # endregion

"""ModelRunner: runs a batch of slices through the model, and samples a token for each slice that completes."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from phase0_request.batch import NO_TOKEN_LEFT, Batch, StepOutput
from phase1_kv_pool.cache import PagedCache
from phase1_kv_pool.pool import KVPool
from phase2_prefill_decode.decoder import Decoder
from phase2_prefill_decode.sampling.processors import Work
from phase2_prefill_decode.sampling.sampler import Sampler
from phase2_prefill_decode.step.device_state import DeviceState
from phase2_prefill_decode.step.graphs import Computed, DecodeGraphs, Record, cuda_record
from phase2_prefill_decode.step.packed import PackedStep, pack
from phase2_prefill_decode.transfer import to_host


class LaunchedStep:
    """A step that may still be on the device, and its result on the way to the host: the tokens, and of each row the
    peak, its largest logit."""

    def __init__(self, step: PackedStep, tokens: Tensor, peaks: Tensor) -> None:
        """Start to copy the draws to the host: a GPU copies them while the next step is launched. A recorded step
        writes its draws to the same place again."""
        self.step = step
        self._tokens, self._peaks = to_host(tokens), to_host(peaks)
        self._output: StepOutput | None = None
        self._copied = None
        if tokens.is_cuda:
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record()

    # region output
    def output(self) -> StepOutput:
        """Wait for the tokens; may be called repeatedly. The token of a slice comes from the first of its rows. Its
        other rows belong to tokens beyond the request, which processors read."""
        if self._output is not None:
            return self._output
        if self._copied is not None:
            self._copied.synchronize()
        tokens, peaks = self._tokens.tolist(), self._peaks.tolist()
        output, last = StepOutput([None] * self.step.slices), None
        # A padded step draws more rows.
        for number, token, peak in zip(self.step.slice_numbers, tokens, peaks, strict=False):
            if number == last:
                continue
            last = number
            if math.isfinite(peak):
                output.tokens[number] = token
            else:
                output.failed[number] = _reason(peak)
        for work in self.step.works:
            work.finish(output, tokens, peaks)
        self._output = output
        return output

    # endregion


def _reason(peak: float) -> str:
    """The reason why no token can be drawn from a row whose largest logit is not finite."""
    if math.isnan(peak):
        return "no token can be drawn: there is NaN among the logits"
    if peak > 0:
        return "no token can be drawn: there is +inf among the logits"
    return NO_TOKEN_LEFT


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
        """With `ahead`, a step may be launched before the previous step's tokens are known."""
        self.decoder = decoder
        self.pool = pool
        self.cache = cache
        self.sampler = sampler
        self.state = state or DeviceState(pool.device)
        self.ahead = ahead
        self.graphs: DecodeGraphs | None = None
        self._latest: LaunchedStep | None = None

    def pack(self, batch: Batch) -> PackedStep:
        """Collect the inputs of the device. `cache.grow` must have allocated the batch's pages."""
        self.state.reserve(self.cache)
        columns, works = self.sampler.pack(batch)
        step = pack(batch, self.cache, self.state.width, columns, works)
        if self.graphs is not None and (size := self.graphs.size_for(step)):
            return self.graphs.pad(step, size)
        return step

    def record(self, sizes: Sequence[int], context: int, record: Record | None = None) -> None:
        """Record decode steps of these sizes, of sequences of up to `context` tokens; by default as CUDA graphs."""
        record = record or cuda_record()
        self._rope = self.decoder.rope(context)  # the graphs hold its addresses; the model may replace its own
        shape = max(sizes), self.decoder.config.vocab_size
        logits = torch.empty(shape, dtype=self.decoder.dtype, device=self.pool.device)  # one for all graphs

        def compute(step: PackedStep, arrays: Sequence[Tensor]) -> Computed:
            computed = self.compute(step, arrays, logits[: len(step.newest_rows)])
            return computed._replace(draws=self.sample(computed))

        self.graphs = DecodeGraphs(self.state, self.cache.page_size, context)
        self.graphs.record(compute, sizes, record)

    # region run
    def launch(self, step: PackedStep) -> LaunchedStep:
        """Run the model and sample. On a GPU this returns before the work is done. If processors depend on a token in
        flight, it waits for the step before, while the device runs this one."""
        works = step.works
        waits = any(work.in_flight for work in works)
        for work in () if waits else works:
            work.start()
        try:
            computed = self.forward(step)
            self.cache.copied()
            if waits and self._latest is not None:
                self._latest.output()
            tokens, peaks = (None if works else computed.draws) or self.sample(computed, works)
        except BaseException:
            for work in works:
                work.cancel()
            raise
        self._latest = LaunchedStep(step, tokens, peaks)
        return self._latest

    def forward(self, step: PackedStep) -> Computed:
        """Run the model on a step."""
        if self.graphs is not None and step.graph_size:
            return self.graphs.replay(step)
        return self.compute(step, step.to(self.pool.device))

    def compute(self, step: PackedStep, arrays: Sequence[Tensor], out: Tensor | None = None) -> Computed:
        """Run the model on a step, given its arrays on the device. A recorded step writes its logits to `out`."""
        tensors = self.state.load(step, arrays)
        return Computed(tensors, *self.decoder(tensors, self.pool.layers, out))

    def sample(self, computed: Computed, works: Sequence[Work] = ()) -> tuple[Tensor, Tensor]:
        """Draw the tokens of a step, and let processors collect their results."""
        step, logits, hidden, _ = computed
        last = logits.shape[0]
        tokens, peaks = self.sampler.sample(logits, step.sampling, works)
        if self.ahead:
            self.state.newest.index_copy_(0, step.newest_rows, tokens)
        for work in works:
            first, last = last, last + len(work.rows)
            work.collect(logits, tokens, hidden[first:last])
        return tokens, peaks

    def run(self, step: PackedStep) -> StepOutput:
        """Run a step and wait for its tokens. A slice that does not complete its request has None."""
        return self.launch(step).output()

    # endregion

"""Engine: a set of prompts in, their answers out. Static batching, the way everyone starts.

A batch is formed once and stays: its prompts are computed together, then every step decodes a token for each that still
runs. Nobody enters before the last has left, and whoever enters has room in the pool for the longest it may become.
Both are waste. Phases 3 to 5 take it away, by planning steps otherwise and by another cache.
"""

import itertools
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing

from tqdm import tqdm

from phase0_request.params import SamplingParams
from phase0_request.request import FinishReason, Request
from phase1_kv_pool.cache import KVCache, PagedCache
from phase1_kv_pool.pool import KVPool
from phase2_prefill_decode.generation import Completion, Delta, Prompt, Transcript, make_requests
from phase2_prefill_decode.model import Model
from phase2_prefill_decode.runner import ModelRunner
from phase2_prefill_decode.sampler import Sampler
from phase2_prefill_decode.stepper import Plan, Stepper, together

Params = SamplingParams | Sequence[SamplingParams] | None


class Engine:
    """A model over a pool of its own. It serves one caller at a time."""

    def __init__(
        self,
        model: Model,
        *,
        cache: KVCache | None = None,
        plan: Plan = together,
        batch_size: int = 64,
        seed: int | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`cache` is by default a plain one of 512 pages of 16 tokens; `seed` is of requests that have none."""
        if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
            raise ValueError(f"batch_size must be an integer from 1, got {batch_size!r}")
        self.model = model
        self.cache = cache or PagedCache(512, 16)
        self.batch_size = batch_size
        self.clock = clock
        self._names = (f"request-{number}" for number in itertools.count(1))
        decoder = model.decoder
        layout = model.config.kv_layout(self.cache.page_size)
        pool = KVPool(layout, self.cache.max_tokens // self.cache.page_size, decoder.device, decoder.dtype)
        sampler = Sampler(model.eos_ids, model.config.vocab_size, decoder.device, seed)
        self.stepper = Stepper(ModelRunner(decoder, pool, self.cache, sampler), model.eos_ids, plan, clock)

    def generate(self, prompts: Sequence[Prompt], params: Params = None, *, progress: bool = False) -> list[Completion]:
        """The answers, in the order of the prompts."""
        requests = make_requests(prompts, params, self.model, self.clock(), self._names)
        transcript = Transcript(requests, self.model.tokenizer)
        bar = tqdm(desc="generating", total=len(requests), leave=False, disable=not progress)
        with bar, closing(self._run(requests, transcript)) as deltas:
            for delta in deltas:
                bar.update(delta.finish_reason is not None)
        return [transcript.completions[request.id] for request in requests]

    def stream(self, prompts: Sequence[Prompt], params: Params = None) -> Generator[Delta]:
        """The answers piece by piece, as steps yield them. Closing the generator aborts what still runs."""
        requests = make_requests(prompts, params, self.model, self.clock(), self._names)
        return self._run(requests, Transcript(requests, self.model.tokenizer))

    # region run
    def _run(self, requests: Sequence[Request], transcript: Transcript) -> Generator[Delta]:
        """One static batch after the other, each from its prompts to its last token."""
        stepper = self.stepper
        if stepper.running:
            raise RuntimeError("this engine is generating already; finish that first, or close it")
        for batch in list(self._batches(requests)):
            try:
                for request in batch:
                    stepper.admit(request)
                while stepper.running:
                    for event in stepper.step().events:
                        delta = transcript.add(event)
                        if delta.finish_reason is not None:  # a stop string in the text, which the step cannot see
                            stepper.finish(event.request, delta.finish_reason)
                        yield delta
            finally:
                for request in list(stepper.running.values()):
                    stepper.finish(request, FinishReason.ABORT)

    # endregion

    def _batches(self, requests: Sequence[Request]) -> Iterator[list[Request]]:
        """Neighbours that fit into the pool together, whatever lengths they grow to."""
        batch: list[Request] = []
        reserved, total = 0, self.cache.max_tokens // self.cache.page_size
        for request in requests:
            longest = len(request.prompt_tokens) + request.params.max_tokens - 1  # the last token is never computed
            pages = -(-longest // self.cache.page_size)
            if pages > total:
                raise ValueError(
                    f"{request.id} may grow to {longest} tokens, and the pool has room for {self.cache.max_tokens}; "
                    f"give the engine a larger cache or the request a smaller max_tokens"
                )
            if batch and (reserved + pages > total or len(batch) == self.batch_size):
                yield batch
                batch, reserved = [], 0
            batch.append(request)
            reserved += pages
        if batch:
            yield batch

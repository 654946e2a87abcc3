"""The engine of this phase: phase 4's, with continuous batching. Prompts in, answers out."""

import itertools
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from typing import Any

from tqdm import tqdm

from phase0_request.request import Request
from phase1_kv_pool.cache import PagedCache
from phase1_kv_pool.pool import KVPool
from phase2_prefill_decode.engine import Params
from phase2_prefill_decode.generation import Completion, Delta, Prompt, Transcript, make_requests
from phase2_prefill_decode.loading.model import Model
from phase2_prefill_decode.sampling.sampler import Sampler
from phase2_prefill_decode.step.packed import PackedStep
from phase2_prefill_decode.step.runner import ModelRunner
from phase3_chunked_prefill.budget import TokenBudget
from phase4_radix.prefix_cache import PrefixCache
from phase5_continuous.core import EngineCore
from phase5_continuous.policies import Policy
from phase5_continuous.scheduler import Scheduler


def core(
    model: Model,
    budget: TokenBudget | None = None,
    *,
    cache: PagedCache | None = None,
    policy: Policy | None = None,
    max_running: int = 64,
    ahead: int = 0,
    seed: int | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> EngineCore[PackedStep]:
    """Make the loop for a model, with a KV pool of its own.

    `cache` is by default a prefix cache of 512 pages of 16 tokens. `seed` is for requests that have none.
    """
    cache = cache or PrefixCache(512, 16)
    decoder = model.decoder
    layout = model.config.kv_layout(cache.page_size)
    pool = KVPool(layout, cache.max_tokens // cache.page_size, decoder.device, decoder.dtype)
    sampler = Sampler.of(model, seed)
    scheduler = Scheduler(cache, model.eos_ids, budget, policy=policy, max_running=max_running, ahead=ahead)
    return EngineCore(scheduler, ModelRunner(decoder, pool, cache, sampler, ahead=ahead > 0), clock)


class ContinuousEngine:
    """Generates text: an EngineCore and a transcript of its tokens. It serves one caller at a time."""

    def __init__(self, model: Model, loop: EngineCore[Any] | None = None) -> None:
        self.model = model
        self.core = loop or core(model)
        self._names = (f"request-{number}" for number in itertools.count(1))

    def generate(self, prompts: Sequence[Prompt], params: Params = None, *, progress: bool = False) -> list[Completion]:
        """The answers, in the order of the prompts."""
        requests = make_requests(prompts, params, self.model, self.core.clock(), self._names)
        transcript = Transcript(requests, self.model.tokenizer)
        bar = tqdm(desc="generating", total=len(requests), leave=False, disable=not progress)
        with bar, closing(self._run(requests, transcript)) as deltas:
            for delta in deltas:
                bar.update(delta.finish_reason is not None)
        return [transcript.completions[request.id] for request in requests]

    def stream(self, prompts: Sequence[Prompt], params: Params = None) -> Generator[Delta]:
        """The answers piece by piece, as steps yield them. Closing the generator aborts what still runs."""
        requests = make_requests(prompts, params, self.model, self.core.clock(), self._names)
        return self._run(requests, Transcript(requests, self.model.tokenizer))

    def _run(self, requests: Sequence[Request], transcript: Transcript) -> Generator[Delta]:
        """Submit all requests at once, and yield their text as steps produce it."""
        if self.core.has_work:
            raise RuntimeError("this engine is generating already; finish that first, or close it")
        going = set[str]()
        try:
            for request in requests:
                self.core.submit(request)
                going.add(request.id)
            for step in self.core.run():
                for event in step.events:
                    if event.request.id not in going:
                        continue  # a stop string in its text has ended it
                    delta = transcript.add(event)
                    if delta.finish_reason is not None:
                        going.remove(event.request.id)
                        self.core.finish(event.request, delta.finish_reason)
                    yield delta
        finally:
            for request in requests:
                self.core.abort(request)
            while self.core.has_work:  # a step in flight still uses their pages
                self.core.step()

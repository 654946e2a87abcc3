"""Engine: prompts in, texts out. It runs phase 0's loop over a model, and keeps a transcript of each answer.

This phase's engine has a static scheduler over a paged cache. Each later phase replaces one part of it: phase 3 how a
step is planned, phase 4 the cache, phase 5 the scheduler.
"""

import itertools
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from typing import Any, Generic, TypeVar

from tqdm import tqdm

from phase0_request.core import EngineCore
from phase0_request.detokenizer import Transcript
from phase0_request.params import SamplingParams
from phase0_request.request import FinishReason, Request
from phase0_request.scheduler import BaseScheduler
from phase1_kv_pool.cache import PagedCache
from phase2_prefill_decode.connect import runner_for
from phase2_prefill_decode.generation import Completion, Delta, Prompt, make_requests
from phase2_prefill_decode.model import Model, sampler_for
from phase2_prefill_decode.scheduler import StaticScheduler

Params = SamplingParams | Sequence[SamplingParams] | None
S = TypeVar("S", bound=BaseScheduler)


class Engine(Generic[S]):
    """Generates texts with a loop and a model. It serves one caller at a time."""

    def __init__(self, model: Model, core: EngineCore[S, Any]) -> None:
        self.model = model
        self.core = core
        self._names = (f"request-{number}" for number in itertools.count(1))

    @classmethod
    def of(
        cls,
        model: Model,
        scheduler: S,
        cache: PagedCache,
        seed: int | None = None,
        clock: Callable[[], float] = time.perf_counter,
        kv_cache_dtype: str | None = None,
    ) -> "Engine[S]":
        """Build an engine from a model, a scheduler and the scheduler's cache."""
        sampler = sampler_for(model, seed)
        runner = runner_for(model.decoder, cache, sampler, kv_cache_dtype, ahead=scheduler.ahead > 0)
        return cls(model, EngineCore(scheduler, runner, clock))

    def generate(self, prompts: Sequence[Prompt], params: Params = None, *, progress: bool = False) -> list[Completion]:
        """Generate the outputs, in the order of the prompts."""
        requests = make_requests(prompts, params, self.model, self.core.clock(), self._names)
        completions = {request.id: Completion(request) for request in requests}
        bar = tqdm(desc="generating", total=len(requests), leave=False, disable=not progress)
        with bar, closing(self._run(requests)) as deltas:
            for delta in deltas:
                completions[delta.request.id].add(delta)
                bar.update(delta.finish_reason is not None)
        return list(completions.values())

    def stream(self, prompts: Sequence[Prompt], params: Params = None) -> Generator[Delta]:
        """Generate the outputs token by token. Closing the generator aborts the requests that still run."""
        return self._run(make_requests(prompts, params, self.model, self.core.clock(), self._names))

    # region run
    def _run(self, requests: Sequence[Request]) -> Generator[Delta]:
        """Submit all requests at once, and yield their text as steps produce it."""
        core, transcripts = self.core, {r.id: Transcript(r.params, self.model.tokenizer) for r in requests}
        if core.has_work:
            raise RuntimeError("this engine is generating already; finish that first, or close it")
        try:
            for request in requests:
                core.submit(request)
            for step in core.run():
                for request, token, reason, more in step.events:
                    transcript = transcripts.get(request.id)
                    if transcript is None or transcript.finish_reason is not None:
                        continue  # another caller's request, or a stop string in its text has ended it
                    text = transcript.add(token, reason)
                    if transcript.finish_reason is FinishReason.STOP:
                        core.stop(request)
                    yield Delta(request, token, text, transcript.finish_reason, more)
        finally:
            for request in requests:
                core.abort(request)
            while core.has_work:  # a step in flight still uses their pages
                core.step()

    # endregion


# region static
def static(
    model: Model,
    *,
    cache: PagedCache | None = None,
    batch_size: int = 64,
    seed: int | None = None,
    kv_cache_dtype: str | None = None,
) -> Engine[StaticScheduler]:
    """Make this phase's engine: static batching. `cache` is by default a plain one of 512 pages of 16 tokens; `seed` is
    for requests without one."""
    cache = cache or PagedCache(512, 16)
    scheduler = StaticScheduler(cache, model.eos_ids, batch_size=batch_size)
    return Engine.of(model, scheduler, cache, seed, kv_cache_dtype=kv_cache_dtype)


# endregion

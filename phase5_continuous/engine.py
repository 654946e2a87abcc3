"""The engine of this phase: phase 4's, with another scheduler. The batch changes at every step."""

import time
from collections.abc import Callable, Mapping
from typing import Any

from phase1_kv_pool.cache import PagedCache
from phase2_prefill_decode.engine import Engine
from phase2_prefill_decode.model import Model
from phase2_prefill_decode.step.runner import ModelRunner
from phase3_chunked_prefill.budget import TokenBudget
from phase4_radix.prefix_cache import PrefixCache
from phase5_continuous.connect import turns
from phase5_continuous.extras.speculation.draft_loading import connect, load_draft_model, sampler_of_drafts
from phase5_continuous.extras.speculation.speculation import speculation_of
from phase5_continuous.policies import Policy
from phase5_continuous.scheduler import Scheduler


def continuous(
    model: Model,
    budget: TokenBudget | None = None,
    *,
    cache: PagedCache | None = None,
    policy: Policy | None = None,
    max_running: int = 64,
    ahead: int = 0,
    speculative_config: Mapping[str, Any] | None = None,
    seed: int | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Engine[Scheduler]:
    """Make an engine with continuous batching. `cache` is by default a prefix cache of 512 pages of 16 tokens; `seed`
    is for requests without one."""
    cache = cache or PrefixCache(512, 16)
    speculation = speculation_of(speculative_config)
    scheduler = Scheduler(
        cache,
        model.eos_ids,
        budget,
        policy=policy,
        turns=turns(),
        max_running=max_running,
        ahead=ahead,
        extender=speculation,
    )
    engine = Engine.of(model, scheduler, seed, clock)
    if speculation is not None and (drafter := speculation.draft_model) is not None:
        draft, runner = load_draft_model(drafter.model, model), engine.core.runner
        assert isinstance(runner, ModelRunner)
        layout = draft.config.kv_layout(cache.page_size, draft.config.dtype)
        pages = cache.max_tokens // cache.page_size
        pool = draft.decoder.backend.kv_pool(layout, pages, draft.decoder.device)
        own = type(cache)(pages, cache.page_size)
        connect(drafter, ModelRunner(draft.decoder, pool, own, sampler_of_drafts(runner.sampler)), runner)
    return engine

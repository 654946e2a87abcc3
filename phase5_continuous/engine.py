"""The engine of this phase: phase 4's, with another scheduler. The batch changes at every step."""

import time
from collections.abc import Callable, Mapping
from typing import Any

from phase1_kv_pool.cache import PagedCache
from phase2_prefill_decode.engine import Engine
from phase2_prefill_decode.model import Model
from phase3_chunked_prefill.budget import TokenBudget
from phase4_radix.prefix_cache import PrefixCache
from phase5_continuous.connect import connect_drafter, extender_of, turns
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
    extender = None if speculative_config is None else extender_of(speculative_config)
    scheduler = Scheduler(
        cache,
        model.eos_ids,
        budget,
        policy=policy,
        turns=turns(),
        max_running=max_running,
        ahead=ahead,
        extender=extender,
    )
    engine = Engine.of(model, scheduler, cache, seed, clock)
    if extender is not None:
        connect_drafter(extender, engine)
    return engine

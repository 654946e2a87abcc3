"""The engine of this phase: phase 4's, with another scheduler. The batch changes at every step."""

import time
from collections.abc import Callable, Mapping
from typing import Any

from phase1_kv_pool.cache import PagedCache
from phase2_prefill_decode.engine import Engine
from phase2_prefill_decode.loading.model import Model
from phase3_chunked_prefill.budget import TokenBudget
from phase4_radix.prefix_cache import PrefixCache
from phase5_continuous.policies import Policy
from phase5_continuous.scheduler import Scheduler
from phase5_continuous.speculation.speculation import speculation_of


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
        cache, model.eos_ids, budget, policy=policy, max_running=max_running, ahead=ahead, speculation=speculation
    )
    return Engine.of(model, scheduler, seed, clock)

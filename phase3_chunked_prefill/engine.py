"""The engine of this phase: phase 2's, with steps under a token budget.

Its requests are still a fixed set, admitted together. Only the plan of a step has changed: prompts are cut into chunks,
and requests whose prompt is computed decode in the same steps.
"""

from phase1_kv_pool.cache import PagedCache
from phase2_prefill_decode.engine import Engine
from phase2_prefill_decode.model import Model
from phase2_prefill_decode.scheduler import StaticScheduler
from phase3_chunked_prefill.budget import TokenBudget
from phase3_chunked_prefill.chunker import Chunker


# region chunked
def chunked(
    model: Model,
    budget: TokenBudget | None = None,
    *,
    cache: PagedCache | None = None,
    batch_size: int = 64,
    seed: int | None = None,
) -> Engine[StaticScheduler]:
    """Make phase 2's engine with another plan, by which no step computes more tokens than the budget has. The output
    is the same."""
    cache = cache or PagedCache(512, 16)
    plan = Chunker(budget or TokenBudget(), cache.page_size).plan
    scheduler = StaticScheduler(cache, model.eos_ids, plan_step=plan, batch_size=batch_size)
    return Engine.of(model, scheduler, cache, seed)


# endregion

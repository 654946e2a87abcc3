"""The engine of this phase: phase 3's engine over a prefix cache.

Its batches are static: all requests of a batch are attached before any of them has computed a token. So they find what
earlier batches left in the cache, but not each other, and a prefix that they share is computed by each of them. Once
published, it is stored once. Phase 5 admits requests at every step, and lets one wait for a prefix that another is
computing.
"""

from phase1_kv_pool.cache import PagedCache
from phase2_prefill_decode.engine import Engine
from phase2_prefill_decode.loading.model import Model
from phase3_chunked_prefill.budget import TokenBudget
from phase3_chunked_prefill.engine import chunked
from phase4_radix.prefix_cache import PrefixCache


def cached(
    model: Model,
    budget: TokenBudget | None = None,
    *,
    num_pages: int = 512,
    page_size: int = 16,
    prefix_cache: bool = True,
    batch_size: int = 64,
    seed: int | None = None,
) -> Engine:
    """Build phase 3's engine with a prefix cache, or with the plain one if `prefix_cache` is false."""
    cache = PrefixCache(num_pages, page_size) if prefix_cache else PagedCache(num_pages, page_size)
    return chunked(model, budget, cache=cache, batch_size=batch_size, seed=seed)

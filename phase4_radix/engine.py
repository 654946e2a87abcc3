"""The engine of this phase: phase 3's engine over a prefix cache.

Its batches are static: all requests of a batch are attached before any of them has computed a token. So they find the
prefixes of earlier batches, but not each other's, and each computes a prefix that they share. Once published, it is
stored once. Phase 5 admits requests at every step, and lets a request wait for a prefix that another is computing.
"""

from phase2_prefill_decode.engine import Engine
from phase2_prefill_decode.model import Model
from phase2_prefill_decode.scheduler import StaticScheduler
from phase3_chunked_prefill.budget import TokenBudget
from phase3_chunked_prefill.engine import chunked
from phase4_radix.prefix_cache import PrefixCache


def cached(
    model: Model,
    budget: TokenBudget | None = None,
    *,
    num_pages: int = 512,
    page_size: int = 16,
    batch_size: int = 64,
    seed: int | None = None,
) -> Engine[StaticScheduler]:
    """Make phase 3's engine with a cache that keeps the pages of ended requests."""
    return chunked(model, budget, cache=PrefixCache(num_pages, page_size), batch_size=batch_size, seed=seed)

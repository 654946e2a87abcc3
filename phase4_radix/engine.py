"""The engine of this phase: phase 3's over a cache that remembers. With the prefix cache off it is phase 3's.

A static batch opens the page tables of all its requests before any of them has computed a token. So its requests find
what earlier batches left behind, and nothing of each other: what several of them begin with, each computes. It is
laid together when it is published, and takes the memory of one from then on. To find each other, requests have to come
one after the other: in calls of their own, or with `batch_size=1`. Phase 5 admits at any step, and makes the second
wait for what the first is about to compute.
"""

from phase1_kv_pool.cache import PagedCache
from phase2_prefill_decode.engine import Engine
from phase2_prefill_decode.model import Model
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
    """An engine that computes no prefix again that it still has. It forgets only what it needs the room of."""
    cache = PrefixCache(num_pages, page_size) if prefix_cache else PagedCache(num_pages, page_size)
    return chunked(model, budget, cache=cache, batch_size=batch_size, seed=seed)

"""A scheduler over a small pool, brought to the moments at which something can happen to a request `r`."""

from typing import Any

from phase0_request import Batch
from phase1_kv_pool import PagedCache
from phase3_chunked_prefill.budget import TokenBudget
from phase4_radix.prefix_cache import PrefixCache
from phase5_continuous.scheduler import Scheduler
from tests.phase5_continuous.support import EOS, Engine, preempted_of, request


def engine(
    pages: int = 100,
    page_size: int = 4,
    budget: TokenBudget | None = None,
    cache: type[PagedCache] = PagedCache,
    **more: Any,
) -> Engine:
    more = {"watermark": 0, **more}
    return Engine(Scheduler(cache(pages, page_size), EOS, budget or TokenBudget(64, 64), **more))


def names(batch: Batch) -> list[str]:
    return [piece.request.id for piece in batch]


def lengths(batch: Batch) -> dict[str, int]:
    return {piece.request.id: piece.length for piece in batch}


def prefix_engine(tokens: int = 16, **more: Any) -> Engine:
    """Pages of four are shared, and a step has so many tokens."""
    return engine(budget=TokenBudget(tokens, 64), cache=PrefixCache, **more)


def waiting(one: Engine) -> None:
    one.submit(request("other", 8, max_tokens=28), request("r", 8, max_tokens=28))


def running(one: Engine) -> None:
    waiting(one)
    one.step()
    one.step()


def in_flight(one: Engine) -> None:
    running(one)
    one.plan()


def preempted(one: Engine) -> None:
    waiting(one)
    while not preempted_of(one.scheduler):
        one.step()

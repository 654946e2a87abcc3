"""Gauges: an engine's state in numbers, at one moment."""

from dataclasses import dataclass

from phase4_radix.prefix_cache import PrefixCache
from phase5_continuous.scheduler import Scheduler


@dataclass(frozen=True, slots=True)
class Gauges:
    """The first group is now; the second counts since the engine was made."""

    running: int = 0
    waiting: int = 0  # those that were preempted among them
    pages_total: int = 0
    pages_free: int = 0
    pages_used: int = 0  # live requests hold them
    pages_cached: int = 0

    preemptions: int = 0
    queries: int = 0  # prompts that were looked up in the prefix cache
    query_tokens: int = 0  # what they had
    hit_tokens: int = 0  # what of it was found
    evictions: int = 0

    @property
    def hit_rate(self) -> float:
        return self.hit_tokens / self.query_tokens if self.query_tokens else 0.0

    @property
    def usage(self) -> float:
        """The share of the pages that live requests hold."""
        return self.pages_used / self.pages_total if self.pages_total else 0.0


def read(scheduler: Scheduler) -> Gauges:
    running_set, cache = scheduler.running_set, scheduler.cache
    usage = cache.usage
    running, waiting = len(running_set.running), len(scheduler.admission.waiting) + len(running_set.preempted)
    now = running, waiting, usage.total, usage.free, usage.referenced, usage.cached
    if not isinstance(cache, PrefixCache):
        return Gauges(*now, running_set.num_preemptions)
    counts = cache.counts
    return Gauges(
        *now, running_set.num_preemptions, counts.queries, counts.query_tokens, counts.hit_tokens, counts.evictions
    )

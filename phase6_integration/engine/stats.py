"""Gauges: the state of an engine at one moment."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from phase4_radix.prefix_cache import Counts, PrefixCache

if TYPE_CHECKING:  # the HTTP process has gauges, and no scheduler
    from phase5_continuous.scheduler import Scheduler


@dataclass(frozen=True, slots=True)
class Gauges:
    """The state of a scheduler and its cache at one moment."""

    running: int = 0
    waiting: int = 0  # preempted requests included
    pages_total: int = 0
    pages_free: int = 0
    pages_used: int = 0  # referenced by live requests
    pages_cached: int = 0

    # Counters since the engine was made.
    preemptions: int = 0
    query_tokens: int = 0  # prompt tokens looked up in the prefix cache
    hit_tokens: int = 0  # of these, found
    extended: int = 0  # slices that an extender has made longer
    beyond: int = 0  # tokens of these beyond those of their requests
    kept: tuple[int, ...] = ()  # of the first of them, the second, ...

    @classmethod
    def read(cls, scheduler: "Scheduler") -> "Gauges":
        running_set, cache = scheduler.running_set, scheduler.cache
        usage = cache.usage
        running, waiting = len(running_set.running), len(scheduler.turns)
        now = running, waiting, usage.total, usage.free, usage.referenced, usage.cached, running_set.num_preemptions
        counts = cache.counts if isinstance(cache, PrefixCache) else Counts()
        longer = () if scheduler.extender is None else scheduler.extender.counts
        return cls(*now, counts.query_tokens, counts.hit_tokens, *longer)

    @property
    def hit_rate(self) -> float:
        """The share of looked-up prompt tokens that the prefix cache had."""
        return self.hit_tokens / self.query_tokens if self.query_tokens else 0.0

    @property
    def usage(self) -> float:
        """The share of the pages that live requests reference."""
        return self.pages_used / self.pages_total if self.pages_total else 0.0

"""The state of an engine at one moment, and its loop as it runs in a server."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from phase0_request.core import EngineCore, Runner, Step
from phase4_radix.prefix_cache import Counts, PrefixCache
from phase5_continuous.extras import invariants
from phase5_continuous.extras.speculation.speculation import speculation_in
from phase5_continuous.scheduler import Scheduler
from phase6_integration.engine.isolation import StepFailedError

if TYPE_CHECKING:
    from phase6_integration.extras.kv_events.kv_events import KVEventPublisher

P = TypeVar("P")


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
    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: tuple[int, ...] = ()  # of these, accepted, by their place in the draft

    @classmethod
    def read(cls, scheduler: Scheduler) -> "Gauges":
        running_set, cache = scheduler.running_set, scheduler.cache
        usage = cache.usage
        running, waiting = len(running_set.running), len(scheduler.turns)
        now = running, waiting, usage.total, usage.free, usage.referenced, usage.cached, running_set.num_preemptions
        counts = cache.counts if isinstance(cache, PrefixCache) else Counts()
        prefixes, speculation = (counts.query_tokens, counts.hit_tokens), speculation_in(scheduler)
        if speculation is None:
            return cls(*now, *prefixes)
        return cls(*now, *prefixes, speculation.drafts, speculation.drafted, tuple(speculation.accepted))

    @property
    def hit_rate(self) -> float:
        """The share of looked-up prompt tokens that the prefix cache had."""
        return self.hit_tokens / self.query_tokens if self.query_tokens else 0.0

    @property
    def usage(self) -> float:
        """The share of the pages that live requests reference."""
        return self.pages_used / self.pages_total if self.pages_total else 0.0


class ObservedCore(EngineCore[Scheduler, P]):
    """The engine loop, with checks of its invariants if `check_invariants`, and with a batch of KV events for each step
    if there is a publisher.
    A step that fails through no request's fault is planned again by the next call, and returned as an empty one:
    requests that ended in flight have freed their pages."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner[P],
        clock: Callable[[], float] = time.monotonic,
        *,
        check_invariants: bool = False,
        kv_events: "KVEventPublisher | None" = None,
    ) -> None:
        super().__init__(scheduler, runner, clock)
        self._kv_events = kv_events
        self._check_invariants = check_invariants

    def step(self) -> Step | None:
        try:
            step = super().step()
        except StepFailedError:
            step = Step(events=self.drain())
        if self._check_invariants:
            invariants.check(self.scheduler)
        if self._kv_events is not None:
            self._kv_events.flush()
        return step

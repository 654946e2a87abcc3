"""Statistics of an engine: counters, means of latencies and current state, in constant memory."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from phase0_request.batch import Event
from phase0_request.core import EngineCore, Runner, Step
from phase0_request.request import FinishReason
from phase4_radix.prefix_cache import Counts, PrefixCache
from phase5_continuous import invariants
from phase5_continuous.scheduler import Scheduler
from phase6_integration.engine.isolation import StepFailedError

if TYPE_CHECKING:
    from phase6_integration.engine.kv_events import KVEventPublisher

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
        running, waiting = len(running_set.running), len(scheduler.admission.waiting) + len(running_set.preempted)
        now = running, waiting, usage.total, usage.free, usage.referenced, usage.cached, running_set.num_preemptions
        counts = cache.counts if isinstance(cache, PrefixCache) else Counts()
        prefixes, speculation = (counts.query_tokens, counts.hit_tokens), scheduler.speculation
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


class Stats:
    """Counts steps, tokens and finished requests, and sums their times."""

    def __init__(self) -> None:
        self.steps = self.prefill_tokens = self.decode_tokens = self.generated_tokens = 0
        self.busy = 0.0  # seconds in steps
        self.finished = dict.fromkeys((reason.value for reason in FinishReason), 0)
        self._times = dict.fromkeys(("queue", "ttft", "itl", "e2e"), (0, 0.0))  # how many, and their sum

    def add_step(self, step: Step) -> None:
        if step.batch:
            self.steps += 1
            self.prefill_tokens += step.prefill_tokens
            self.decode_tokens += step.decode_tokens
            self.busy += step.seconds
        self.add_events(step.events)

    def add_events(self, events: list[Event]) -> None:
        for event in events:
            self.generated_tokens += event.token is not None
            if event.finish_reason is not None:
                self.finished[event.finish_reason.value] += 1
                times = event.request.times
                self._add("queue", [times.queue_time])
                self._add("ttft", [times.ttft])
                self._add("itl", times.itl)
                self._add("e2e", [times.e2e])

    def _add(self, name: str, times: Sequence[float | None]) -> None:
        """Add times of a request, of which one that it did not come to is None."""
        seconds = [time for time in times if time is not None]
        count, total = self._times[name]
        self._times[name] = count + len(seconds), total + sum(seconds)

    def report(self, gauges: Gauges) -> dict[str, Any]:
        """All figures by name. `throughput` is generated tokens per second of step time, idle time excluded."""
        tokens = self.prefill_tokens + self.decode_tokens
        return {
            "steps": self.steps,
            "avg_tokens_per_step": tokens / self.steps if self.steps else 0.0,
            "prefill_tokens": self.prefill_tokens,
            "decode_tokens": self.decode_tokens,
            "generated_tokens": self.generated_tokens,
            "throughput": self.generated_tokens / self.busy if self.busy else 0.0,
            "cache_hit_rate": gauges.hit_rate,
            "running": gauges.running,
            "waiting": gauges.waiting,
            "preemptions": gauges.preemptions,
            "draft_tokens": gauges.draft_tokens,
            "accepted_tokens": sum(gauges.accepted_tokens),
            "pages": {
                "total": gauges.pages_total,
                "free": gauges.pages_free,
                "used": gauges.pages_used,
                "cached": gauges.pages_cached,
            },
            "finished": dict(self.finished),
            "mean_ms": {name: 1e3 * total / max(count, 1) for name, (count, total) in self._times.items()},
        }


class ObservedCore(EngineCore[Scheduler, P]):
    """The engine loop, with checks of its invariants if `check_invariants`, counted in `stats` if they are given, and
    with a batch of KV events for each step if there is a publisher.
    A step that fails through no request's fault is planned again by the next call, and returned as an empty one:
    requests that ended in flight have freed their pages."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner[P],
        clock: Callable[[], float] = time.monotonic,
        *,
        check_invariants: bool = False,
        stats: Stats | None = None,
        kv_events: "KVEventPublisher | None" = None,
    ) -> None:
        super().__init__(scheduler, runner, clock)
        self._stats = stats
        self._kv_events = kv_events
        self._check_invariants = check_invariants

    def step(self) -> Step | None:
        try:
            step = super().step()
        except StepFailedError:
            step = Step(events=super().drain())
        if self._check_invariants:
            invariants.check(self.scheduler)
        if step is not None and self._stats is not None:
            self._stats.add_step(step)
        if self._kv_events is not None:
            self._kv_events.flush()
        return step

    def drain(self) -> list[Event]:
        events = super().drain()
        if self._stats is not None:
            self._stats.add_events(events)
        return events

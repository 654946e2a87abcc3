"""Stats: what an engine has done, in numbers that do not grow with it."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from phase0_request.events import Event
from phase0_request.request import FinishReason, Request
from phase5_continuous import invariants
from phase5_continuous.core import EngineCore, Packed, Runner, Step
from phase5_continuous.histogram import Histogram
from phase5_continuous.scheduler import Scheduler
from phase6_integration.gauges import Gauges

QUANTILES = (50, 90, 99)
P = TypeVar("P", bound=Packed)


@dataclass(slots=True)
class Stats:
    """Counts steps and requests as they end. Percentiles are right to 1 %."""

    steps: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    generated_tokens: int = 0
    busy: float = 0.0  # seconds in steps
    finished: dict[str, int] = field(default_factory=lambda: {reason.value: 0 for reason in FinishReason})
    queue: Histogram = field(default_factory=Histogram)
    ttft: Histogram = field(default_factory=Histogram)
    itl: Histogram = field(default_factory=Histogram)
    e2e: Histogram = field(default_factory=Histogram)

    def step(self, step: Step) -> None:
        if step.batch:
            self.steps += 1
            self.prefill_tokens += step.prefill_tokens
            self.decode_tokens += step.decode_tokens
            self.busy += sum(step.spent)
        self.events(step.events)

    def events(self, events: list[Event]) -> None:
        for event in events:
            self.generated_tokens += event.token is not None
            if event.finish_reason is not None:
                self._end(event.request)

    def report(self, gauges: Gauges) -> dict[str, float | int | dict[str, float] | dict[str, int]]:
        """All of it by name. Rates are of the time spent in steps; latencies in milliseconds."""
        tokens = self.prefill_tokens + self.decode_tokens
        latencies = {"queue": self.queue, "ttft": self.ttft, "itl": self.itl, "e2e": self.e2e}
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
            "pages": {
                "total": gauges.pages_total,
                "free": gauges.pages_free,
                "used": gauges.pages_used,
                "cached": gauges.pages_cached,
            },
            "finished": dict(self.finished),
            **{
                f"{name}_ms": {f"p{q}": 1e3 * histogram.percentile(q) for q in QUANTILES}
                for name, histogram in latencies.items()
            },
        }

    def _end(self, request: Request) -> None:
        times, reason = request.times, request.finish_reason
        if reason is not None:
            self.finished[reason.value] += 1
        for histogram, seconds in ((self.queue, times.queue_time), (self.ttft, times.ttft), (self.e2e, times.e2e)):
            if seconds is not None:
                histogram.add(seconds)
        for gap in times.itl:
            self.itl.add(gap)


class CountedCore(EngineCore[P]):
    """The loop, with all it does counted; and with `check`, every invariant held up after each step."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner[P],
        clock: Callable[[], float] = time.monotonic,
        *,
        check: bool = False,
    ) -> None:
        super().__init__(scheduler, runner, clock)
        self.stats = Stats()
        self._checked = scheduler if check else None

    def step(self) -> Step | None:
        step = super().step()
        if self._checked is not None:
            invariants.check(self._checked)
        if step is not None:
            self.stats.step(step)
        return step

    def drain(self) -> list[Event]:
        events = super().drain()
        self.stats.events(events)
        return events

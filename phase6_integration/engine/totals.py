"""Totals of an engine in this process: counters, and means of latencies, in constant memory."""

from collections.abc import Sequence
from typing import Any

from phase0_request.core import CoreObserver, Step
from phase0_request.request import FinishReason
from phase6_integration.engine.stats import Gauges


class Totals(CoreObserver):
    """Counts steps, tokens and finished requests, and sums their times."""

    def __init__(self) -> None:
        self.steps = self.prefill_tokens = self.decode_tokens = self.generated_tokens = 0
        self.busy = 0.0  # seconds in steps
        self.finished = dict.fromkeys((reason.value for reason in FinishReason), 0)
        self._times = dict.fromkeys(("queue", "ttft", "itl", "e2e"), (0, 0.0))  # how many, and their sum

    def completed(self, step: Step) -> None:
        if step.batch:
            self.steps += 1
            self.prefill_tokens += step.prefill_tokens
            self.decode_tokens += step.decode_tokens
            self.busy += step.seconds
        for event in step.events:
            self.generated_tokens += event.token is not None
            if event.finish_reason is not None:
                self.finished[event.finish_reason.value] += 1
                times = event.request.times
                self._add("queue", [times.queue_time])
                self._add("ttft", [times.ttft])
                self._add("itl", times.itl)
                self._add("e2e", [times.e2e])

    def _add(self, name: str, times: Sequence[float | None]) -> None:
        """Add the times of a request; a time that it did not reach is None."""
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
            "pages": {
                "total": gauges.pages_total,
                "free": gauges.pages_free,
                "used": gauges.pages_used,
                "cached": gauges.pages_cached,
            },
            "finished": dict(self.finished),
            "mean_ms": {name: 1e3 * total / max(count, 1) for name, (count, total) in self._times.items()},
        }

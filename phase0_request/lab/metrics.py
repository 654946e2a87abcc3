"""Serving metrics over finished requests: throughput and latency percentiles."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np

from phase0_request.request import Request


def percentile(values: Sequence[float], q: float) -> float:
    """The q-th percentile, linearly interpolated. NaN for no values."""
    return float(np.percentile(values, q)) if values else math.nan


@dataclass(frozen=True, slots=True)
class Summary:
    """Throughput and latencies of one run. Times in seconds."""

    requests: int
    tokens: int
    seconds: float
    queue: tuple[float, ...]
    ttft: tuple[float, ...]
    itl: tuple[float, ...]
    e2e: tuple[float, ...]

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds if self.seconds else math.nan

    def figures(self) -> dict[str, float]:
        """The figures of a result file, with latencies in milliseconds. A latency without a sample is left out."""
        figures = {"requests": self.requests, "tokens": self.tokens, "seconds": self.seconds}
        figures["tokens_per_second"] = self.tokens_per_second
        for name, seconds in (("ttft", self.ttft), ("itl", self.itl)):
            if seconds:
                times = [1e3 * second for second in seconds]
                figures |= {f"{name}_p50_ms": percentile(times, 50), f"{name}_p99_ms": percentile(times, 99)}
                figures[f"{name}_mean_ms"] = fmean(times)
        return figures


def summarize(requests: Iterable[Request]) -> Summary:
    """Summarize the finished requests, from the first arrival to the last end."""
    times = [r.times for r in requests if r.finished]
    ends = [t.finished for t in times if t.finished is not None]
    return Summary(
        requests=len(times),
        tokens=sum(len(t.tokens) for t in times),
        seconds=max(ends) - min(t.arrival for t in times) if times else 0.0,
        queue=tuple(t.queue_time for t in times if t.queue_time is not None),
        ttft=tuple(t.ttft for t in times if t.ttft is not None),
        itl=tuple(gap for t in times for gap in t.itl),
        e2e=tuple(t.e2e for t in times if t.e2e is not None),
    )

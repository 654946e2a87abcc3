"""Stats: counts the tokens and latencies of a run, and the requests that met their SLO, in constant memory."""

import math
from dataclasses import dataclass, field

from phase0_request.lab.metrics import percentile
from phase0_request.request import FinishReason, Request
from phase0_request.support.checks import check_number

_PER_E = 100  # buckets for each factor of e: neighbours differ by 1 %


@dataclass(slots=True)
class Histogram:
    """Counts durations in buckets that each span 1 %. Percentiles are exact to that."""

    count: int = 0
    total: float = 0.0
    most: float = 0.0
    _buckets: dict[int, int] = field(default_factory=dict)

    def add(self, seconds: float) -> None:
        bucket = math.floor(math.log(seconds) * _PER_E) if seconds > 1e-9 else -10_000
        self._buckets[bucket] = self._buckets.get(bucket, 0) + 1
        self.count += 1
        self.total += seconds
        if seconds > self.most:
            self.most = seconds

    def __len__(self) -> int:
        """The number of buckets."""
        return len(self._buckets)

    @property
    def mean(self) -> float:
        return self.total / self.count if self.count else 0.0

    def percentile(self, q: float) -> float:
        """The duration that q percent do not exceed; 0 if there are none."""
        left = math.ceil(self.count * q / 100)
        for bucket in sorted(self._buckets):
            left -= self._buckets[bucket]
            if left <= 0:
                return min(math.exp((bucket + 1) / _PER_E), self.most)
        return 0.0


@dataclass(frozen=True, slots=True)
class SLO:
    """A service-level objective: the latency a request should have. Goodput counts the requests that met it."""

    ttft: float = 1.0  # seconds to the first token
    gap: float = 0.025  # seconds from one token to the next, at the 99th percentile of its answer

    def __post_init__(self) -> None:
        for name in ("ttft", "gap"):
            check_number(name, getattr(self, name), 0, above=True)

    def met(self, request: Request) -> bool:
        times = request.times
        if not times.tokens or request.finish_reason not in (FinishReason.STOP, FinishReason.LENGTH):
            return False
        gaps = times.itl
        return times.tokens[0] - times.arrival <= self.ttft and (not gaps or percentile(gaps, 99) <= self.gap)


@dataclass(frozen=True, slots=True)
class Outcome:
    """A run in numbers; times in seconds."""

    requests: int  # that ended
    refused: int  # at submission
    failed: int  # ended neither by a stop nor by length
    seconds: float
    tokens: int  # generated
    tokens_per_second: float
    goodput: float  # requests that met the SLO, per second of the time in which requests arrived
    attainment: float  # their share of all requests
    ttft_p50: float
    ttft_p99: float
    itl_p50: float
    itl_p99: float
    queue_max: float  # the longest time to admission
    fairness: float  # Jain's index of the tokens a second of each request: 1 if all are equal, 1 / n if one has all
    preemptions: int
    prefill_tokens: int  # computed
    prompt_tokens: int  # of the requests
    steps: int
    mean_batch: float
    most_live: int  # requests in memory at once


@dataclass(slots=True)
class Stats:
    """Counters of a run."""

    slo: SLO = field(default_factory=SLO)
    ended: int = 0
    refused: int = 0
    failed: int = 0
    met: int = 0
    tokens: int = 0
    asked: int = 0
    prefill: int = 0
    slices: int = 0
    steps: int = 0
    most_live: int = 0
    arrived: float = 0.0  # the last
    ttft: Histogram = field(default_factory=Histogram)
    itl: Histogram = field(default_factory=Histogram)
    queue: Histogram = field(default_factory=Histogram)
    _rates: float = 0.0
    _squares: float = 0.0

    def arrive(self, time: float) -> None:
        """Count an arrival. The request may yet be refused."""
        self.arrived = max(self.arrived, time)

    def step(self, prefill: int, slices: int, live: int) -> None:
        self.prefill += prefill
        self.slices += slices
        self.steps += slices > 0
        self.most_live = max(self.most_live, live)

    def end(self, request: Request) -> None:
        """Count a request that has ended. Its times are not needed again."""
        times = request.times
        self.ended += 1
        self.failed += request.finish_reason not in (FinishReason.STOP, FinishReason.LENGTH)
        self.met += self.slo.met(request)
        self.tokens += len(times.tokens)
        self.asked += len(request.prompt_tokens)
        if times.tokens:
            self.ttft.add(times.tokens[0] - times.arrival)
        for gap in times.itl:
            self.itl.add(gap)
        if times.queue_time is not None:
            self.queue.add(times.queue_time)
        if times.e2e:
            rate = len(times.tokens) / times.e2e
            self._rates += rate
            self._squares += rate * rate

    def outcome(self, seconds: float, preemptions: int) -> Outcome:
        """Summarise a run of `seconds`. If all requests were there at the start, goodput is of the whole run."""
        arriving = self.arrived or seconds
        n, asked = max(self.ended, 1), self.ended + self.refused
        return Outcome(
            requests=self.ended,
            refused=self.refused,
            failed=self.failed,
            seconds=seconds,
            tokens=self.tokens,
            tokens_per_second=self.tokens / seconds if seconds else 0.0,
            goodput=self.met / arriving if arriving else 0.0,
            attainment=self.met / asked if asked else 0.0,
            ttft_p50=self.ttft.percentile(50),
            ttft_p99=self.ttft.percentile(99),
            itl_p50=self.itl.percentile(50),
            itl_p99=self.itl.percentile(99),
            queue_max=self.queue.most,
            fairness=self._rates**2 / (n * self._squares) if self._squares else 1.0,
            preemptions=preemptions,
            prefill_tokens=self.prefill,
            prompt_tokens=self.asked,
            steps=self.steps,
            mean_batch=self.slices / self.steps if self.steps else 0.0,
            most_live=self.most_live,
        )

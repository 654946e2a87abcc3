"""Histogram: percentiles of durations, in memory that does not grow with their number."""

import math
from dataclasses import dataclass, field

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

"""What has happened lately, in bounded memory: rates over the last minute, percentiles over the last few thousand."""

from array import array
from collections import deque
from collections.abc import Callable, Iterable

from phase0_request.metrics import percentile

WINDOW = 60  # seconds
KEPT = 4096  # values
QUANTILES = (50, 90, 99)


class Rate:
    """So much a second, over the last WINDOW whole seconds: one number is kept for each of them."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._start = int(clock())
        self._sums: deque[tuple[int, float]] = deque()  # second, sum of it; the oldest first

    def add(self, amount: float) -> None:
        second = int(self._clock())
        if self._sums and self._sums[-1][0] == second:
            amount += self._sums.pop()[1]
        self._sums.append((second, amount))
        self._forget(second)

    def per_second(self) -> float:
        now = int(self._clock())
        self._forget(now)
        seconds = min(WINDOW, now - self._start)
        return sum(amount for second, amount in self._sums if second < now) / seconds if seconds else 0.0

    def _forget(self, now: int) -> None:
        while self._sums and self._sums[0][0] < now - WINDOW:
            self._sums.popleft()


class Latencies:
    """The last KEPT values of one latency, in seconds."""

    def __init__(self) -> None:
        self._values = array("d")
        self._oldest = 0  # where the next value goes, once there are KEPT

    def extend(self, values: Iterable[float]) -> None:
        for value in values:
            if len(self._values) < KEPT:
                self._values.append(value)
            else:
                self._values[self._oldest] = value
                self._oldest = (self._oldest + 1) % KEPT

    def quantiles(self) -> dict[str, float | None]:
        """By name, p50 and so on. None before there was any value."""
        values = sorted(self._values)
        return {f"p{q}": round(percentile(values, q), 6) if values else None for q in QUANTILES}

"""Histogram: how many values fell below each bound. Its size does not depend on how many there were."""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import accumulate


class Histogram:
    """Counts by bound, as Prometheus has them: a value on a bound falls below it."""

    __slots__ = ("_counts", "bounds", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        if not bounds or list(bounds) != sorted(set(bounds)):
            raise ValueError(f"the bounds of a histogram must rise, got {list(bounds)!r:.80}")
        self.bounds = tuple(bounds)
        self.sum = 0.0
        self._counts = [0] * (len(bounds) + 1)  # the last one is of values above every bound

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def extend(self, values: Iterable[float]) -> None:
        for value in values:
            self.observe(value)

    @property
    def count(self) -> int:
        return sum(self._counts)

    def buckets(self) -> list[tuple[str, float]]:
        """(bound, values at or below it), and all of them under +Inf."""
        names = [*(repr(float(bound)) for bound in self.bounds), "+Inf"]
        return list(zip(names, map(float, accumulate(self._counts)), strict=True))


def one_two_five(most: int) -> list[float]:
    """1, 2, 5, 10, 20, 50, ... as far as `most`."""
    steps: list[float] = []
    power = 1
    while power <= most:
        steps += [power * digit for digit in (1, 2, 5) if power * digit <= most]
        power *= 10
    return steps

"""Deadlines: how long a request may wait and how long it may take. Alarms: whose time is up."""

import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from phase5_continuous.seat import Seat


@dataclass(frozen=True, slots=True)
class Deadlines:
    """Seconds from arrival; None is for ever."""

    queue: float | None = None  # to the first admission
    total: float | None = None  # to the end

    def __post_init__(self) -> None:
        for name in ("queue", "total"):
            value = getattr(self, name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
                raise ValueError(
                    f"the {name} deadline must be a finite number of seconds above 0, or None; got {value!r}"
                )


@dataclass(slots=True)
class Alarms:
    """A heap by time. Alarms of those who have ended stay in it until they surface, or until the heap has doubled."""

    _heap: list[tuple[float, int, bool, Seat]] = field(default_factory=list)  # time, number of the seat, queue?, seat
    _swept: int = 64  # how many were left when the dead were last thrown out

    def __len__(self) -> int:
        return len(self._heap)

    def set(self, seat: Seat, deadlines: Deadlines) -> None:
        arrival, number = seat.request.arrival, seat.key[1]
        for seconds, of_queue in ((deadlines.queue, True), (deadlines.total, False)):
            if seconds is not None:
                heapq.heappush(self._heap, (arrival + seconds, number, of_queue, seat))
        if len(self._heap) > 2 * self._swept:
            self._heap = [alarm for alarm in self._heap if _is_live(alarm[3], alarm[2])]
            heapq.heapify(self._heap)
            self._swept = max(len(self._heap), 64)

    def due(self, now: float) -> Iterator[Seat]:
        """Those whose time is up, each once."""
        while self._heap and self._heap[0][0] <= now:
            _, _, of_queue, seat = heapq.heappop(self._heap)
            if _is_live(seat, of_queue):
                yield seat


def _is_live(seat: Seat, of_queue: bool) -> bool:
    """A queue deadline is met by the first admission, whatever comes after."""
    request = seat.request
    return not request.finished and not (of_queue and request.times.admitted is not None)

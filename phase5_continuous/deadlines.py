"""Deadlines: how long a request may wait, and how long it may take. Alarms: the requests past their deadline."""

import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from phase5_continuous.running import SequenceState


@dataclass(frozen=True, slots=True)
class Deadlines:
    """Seconds from arrival; None means no limit."""

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
    """A heap by time. Alarms of requests that have ended stay in it until they surface, or until it has doubled."""

    _heap: list[tuple[float, int, bool, SequenceState]] = field(
        default_factory=list
    )  # time, number, of queue?, sequence
    _swept: int = 64  # the size of the heap after the last sweep

    def __len__(self) -> int:
        return len(self._heap)

    def set(self, sequence: SequenceState, deadlines: Deadlines) -> None:
        """Set the alarms of a new request."""
        arrival, number = sequence.request.arrival, sequence.key[1]
        for seconds, of_queue in ((deadlines.queue, True), (deadlines.total, False)):
            if seconds is not None:
                heapq.heappush(self._heap, (arrival + seconds, number, of_queue, sequence))
        if len(self._heap) > 2 * self._swept:
            self._heap = [alarm for alarm in self._heap if _is_live(alarm[3], alarm[2])]
            heapq.heapify(self._heap)
            self._swept = max(len(self._heap), 64)

    def due(self, now: float) -> Iterator[SequenceState]:
        """The requests past their deadline, each once."""
        while self._heap and self._heap[0][0] <= now:
            _, _, of_queue, sequence = heapq.heappop(self._heap)
            if _is_live(sequence, of_queue):
                yield sequence


def _is_live(sequence: SequenceState, of_queue: bool) -> bool:
    """A queue deadline is met by the first admission, whatever comes after."""
    request = sequence.request
    return not request.finished and not (of_queue and request.times.admitted is not None)

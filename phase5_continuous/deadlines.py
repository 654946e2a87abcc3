"""Deadlines: the requests that have taken longer than they may."""

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field

from phase5_continuous.running import SequenceState


@dataclass(slots=True)
class Deadlines:
    """A heap by time. Requests that have ended stay in it until they surface, or until it has doubled."""

    _heap: list[tuple[float, int, SequenceState]] = field(default_factory=list)  # time, number, sequence
    _swept: int = 64  # the size of the heap after the last sweep

    def __len__(self) -> int:
        return len(self._heap)

    def set(self, sequence: SequenceState, timeout: float) -> None:
        """Set the deadline of a new request, in seconds from its arrival."""
        heapq.heappush(self._heap, (sequence.request.arrival + timeout, sequence.key[1], sequence))
        if len(self._heap) > 2 * self._swept:
            self._heap = [entry for entry in self._heap if not entry[2].request.finished]
            heapq.heapify(self._heap)
            self._swept = max(len(self._heap), 64)

    def due(self, now: float) -> Iterator[SequenceState]:
        """The live requests past their deadline, each once."""
        while self._heap and self._heap[0][0] <= now:
            sequence = heapq.heappop(self._heap)[2]
            if not sequence.request.finished:
                yield sequence

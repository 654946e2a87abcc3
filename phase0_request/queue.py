"""RequestQueue: those who wait. First in, first out within a priority; any of them may leave at any time."""

import heapq
import itertools
from collections.abc import Iterator

from phase0_request.request import Request

_Entry = tuple[int, int, Request]  # priority, ticket, request: heap order is queue order, tickets are never equal


class QueueFullError(RuntimeError):
    """The queue holds as many as it may. Nothing was changed; the client may try again later."""

    def __init__(self, limit: int) -> None:
        super().__init__(f"the queue is full: {limit} requests wait already; try again later")


class RequestQueue:
    """A heap of tickets. `remove` only forgets a ticket; the heap drops forgotten ones when they surface, or all at
    once when they outnumber the live ones. So every operation is O(log n), amortised, and memory stays O(n)."""

    def __init__(self, limit: int | None = None) -> None:
        if limit is not None and limit < 1:
            raise ValueError(f"limit must be at least 1 or None, got {limit}")
        self.limit = limit
        self._heap: list[_Entry] = []
        self._tickets: dict[str, int] = {}  # request id -> its live ticket
        self._back = itertools.count(0, 1)
        self._front = itertools.count(-1, -1)

    def __len__(self) -> int:
        return len(self._tickets)

    def __contains__(self, request: Request) -> bool:
        return request.id in self._tickets

    def __iter__(self) -> Iterator[Request]:
        """In the order in which they would be popped."""
        return (entry[2] for entry in sorted(self._heap, key=lambda e: e[:2]) if self._is_live(entry))

    def push(self, request: Request) -> None:
        """To the back of its priority. QueueFullError when the limit is reached."""
        if self.limit is not None and len(self) >= self.limit:
            raise QueueFullError(self.limit)
        self._insert(request, next(self._back))

    def push_front(self, request: Request) -> None:
        """To the front of its priority: a preempted request comes back. It was let in once, so no limit applies."""
        self._insert(request, next(self._front))

    def peek(self) -> Request | None:
        """Who is next; None if nobody waits."""
        # region exercise 0.5
        while self._heap and not self._is_live(self._heap[0]):
            heapq.heappop(self._heap)
        return self._heap[0][2] if self._heap else None
        # endregion

    def pop(self) -> Request:
        """Take who is next. IndexError if nobody waits."""
        request = self.peek()
        if request is None:
            raise IndexError("pop from an empty queue")
        heapq.heappop(self._heap)
        del self._tickets[request.id]
        return request

    def remove(self, request: Request) -> bool:
        """Let one go that will not wait longer. False if it was not waiting."""
        if self._tickets.pop(request.id, None) is None:
            return False
        if len(self._heap) > 2 * len(self._tickets) + 8:
            self._heap = [entry for entry in self._heap if self._is_live(entry)]
            heapq.heapify(self._heap)
        return True

    def _insert(self, request: Request, ticket: int) -> None:
        if request.id in self._tickets:
            raise ValueError(f"request {request.id} is in the queue already")
        heapq.heappush(self._heap, (request.priority, ticket, request))
        self._tickets[request.id] = ticket

    def _is_live(self, entry: _Entry) -> bool:
        return self._tickets.get(entry[2].id) == entry[1]

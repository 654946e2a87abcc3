"""RequestQueue: requests in the order in which they are served. A request may leave from any place, at any time."""

import bisect
from collections.abc import Iterator
from operator import attrgetter
from typing import Generic, NamedTuple, Protocol, TypeVar

from phase0_request.request import Request

Key = tuple[float, int]
"""(rank, number): lower ranks go first; within a rank, first in, first out. Numbers are unique."""

_KEY = attrgetter("key")


class Entry(Protocol):
    """What a queue holds: a request, and the key that says where it stands."""

    @property
    def key(self) -> Key: ...

    @property
    def request(self) -> Request: ...


E = TypeVar("E", bound=Entry)


class WaitingRequest(NamedTuple):
    """A request and its place in the queue."""

    key: Key
    request: Request


class QueueFullError(RuntimeError):
    """The queue is at its limit. Nothing was changed; the client may try again later."""

    def __init__(self, limit: int) -> None:
        super().__init__(f"the queue is full: {limit} requests wait already; try again later")


class RequestQueue(Generic[E]):
    """A list that is kept sorted by key. Adding and removing take a binary search, O(log n) comparisons; moving the
    pointers behind that place is one `memmove`."""

    def __init__(self, limit: int | None = None) -> None:
        if limit is not None and limit < 1:
            raise ValueError(f"limit must be at least 1 or None, got {limit}")
        self.limit = limit
        self._entries: list[E] = []

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[E]:
        return iter(self._entries)

    # region exercise 0.5
    def add(self, entry: E) -> None:
        """Insert an entry at the place of its key. QueueFullError if the queue is at its limit."""
        if self.limit is not None and len(self._entries) >= self.limit:
            raise QueueFullError(self.limit)
        bisect.insort(self._entries, entry, key=_KEY)

    def remove(self, entry: E) -> None:
        """Take an entry out, wherever it stands. ValueError if it is not in the queue."""
        place = bisect.bisect_left(self._entries, entry.key, key=_KEY)
        if place == len(self._entries) or self._entries[place] is not entry:
            raise ValueError(f"request {entry.request.id} is not in this queue")
        del self._entries[place]

    # endregion

    def pop(self) -> E:
        """Take the first entry out. IndexError if the queue is empty."""
        return self._entries.pop(0)

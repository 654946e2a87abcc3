"""SequenceState: a scheduler's record of a request. RequestQueue: requests in the order in which it serves them."""

import bisect
from collections.abc import Iterator
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Protocol

from phase0_request.request import Request

Key = tuple[float, int]
"""(rank, number): the lower rank goes first; within a rank, first in, first out. Numbers are unique."""

_KEY = attrgetter("key")


class WaitHandle(Protocol):
    """Reports when a blocked request can take part in steps again."""

    def done(self) -> bool: ...


@dataclass(slots=True, eq=False)
class SequenceState:
    """A scheduler's record of a live request, from its submission until it has ended with nothing in flight.

    A slice counts here as soon as it is scheduled, and in the request itself once it is committed. So the scheduler can
    plan a step while another is on the device:

        request.computed <= num_scheduled <= num_tokens

    - `request.computed`: committed
    - `num_scheduled`: also counts what is in flight
    - `num_tokens`: all there is to compute, including a token still in flight

    A scheduler that runs one step at a time needs only the request and the key.
    """

    request: Request
    key: Key = (0, 0)  # the order of admission and preemption, fixed for life
    longest: int = field(init=False)  # the most tokens that are ever computed: the last one of the output never is
    num_tokens: int = field(init=False)
    num_scheduled: int = field(init=False)
    in_flight: int = field(init=False)  # slices scheduled and not committed
    capacity: int = field(init=False)  # tokens for which it has pages; 0 while it takes part in no step
    blocked_by: WaitHandle | None = field(init=False)  # it takes part in no step until this is done
    waiting_on: "tuple[SequenceState, int] | None" = None  # which computes a prefix for both, and the prefix's length

    def __post_init__(self) -> None:
        self.longest = len(self.request.prompt_tokens) + self.request.params.max_tokens - 1
        self.reset()

    def reset(self, capacity: int = 0) -> None:
        """Count again from the request's computed tokens, with nothing in flight."""
        request = self.request
        self.num_scheduled, self.num_tokens, self.in_flight = request.computed, request.total, 0
        self.blocked_by = None
        self.capacity = capacity

    def schedule(self, length: int) -> None:
        """Count a slice of `length` tokens as in flight."""
        self.in_flight += 1
        self.num_scheduled += length
        if self.num_scheduled == self.num_tokens < self.longest:
            self.num_tokens += 1

    def catch_up(self) -> None:
        """Count the tokens that an Outcome has added to the request."""
        self.num_scheduled = max(self.num_scheduled, self.request.computed)
        self.num_tokens = max(self.num_tokens, self.request.total)

    def block(self, until: WaitHandle) -> None:
        """Take part in no step until this is done. A slice in flight has no token to compute and no longer counts."""
        self.blocked_by = until
        self.num_scheduled, self.num_tokens = self.request.computed, self.request.total


class QueueFullError(RuntimeError):
    """The queue is at its limit. Nothing was changed; the client may try again later."""

    def __init__(self, limit: int) -> None:
        super().__init__(f"the queue is full: {limit} requests are already waiting; try again later")


class RequestQueue:
    """A list sorted by key, which a request may leave from any place at any time. Adding and removing take a binary
    search, O(log n) comparisons, and one `memmove` for the pointers after that place."""

    def __init__(self, limit: int | None = None) -> None:
        if limit is not None and limit < 1:
            raise ValueError(f"limit must be at least 1 or None, got {limit}")
        self.limit = limit
        self._entries: list[SequenceState] = []

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[SequenceState]:
        return iter(self._entries)

    # region exercise 0.4
    def add(self, entry: SequenceState, again: bool = False) -> None:
        """Insert an entry at the place of its key. QueueFullError if the queue is at its limit; an entry that comes
        back (`again`) is exempt."""
        if self.limit is not None and len(self._entries) >= self.limit and not again:
            raise QueueFullError(self.limit)
        bisect.insort(self._entries, entry, key=_KEY)

    def remove(self, entry: SequenceState) -> None:
        """Remove an entry from wherever it stands. ValueError if it is not in the queue."""
        place = bisect.bisect_left(self._entries, entry.key, key=_KEY)
        if place == len(self._entries) or self._entries[place] is not entry:
            raise ValueError(f"request {entry.request.id} is not in this queue")
        del self._entries[place]

    # endregion

    def clear(self) -> None:
        self._entries.clear()

    def pop(self) -> SequenceState:
        """Remove and return the first entry. IndexError if the queue is empty."""
        return self._entries.pop(0)

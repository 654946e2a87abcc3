"""Turns: the order in which waiting requests are admitted and running ones are preempted. OneQueue: by rank."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import Protocol

from phase0_request.batch import Event
from phase0_request.queue import RequestQueue, SequenceState
from phase0_request.request import RequestState


class Turns(Protocol):
    """The requests that do not run, and the order in which they get pages."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[SequenceState]: ...

    def add(self, sequence: SequenceState) -> None:
        """Queue a new request. QueueFullError if the queue is at its limit."""

    def put_back(self, sequence: SequenceState) -> None:
        """Queue a request again, for example after a preemption."""

    def remove(self, sequence: SequenceState) -> None:
        """Take a request out of the queue, because it runs now or has ended."""

    def clear(self) -> None:
        """Empty the queue. The caller puts its requests back."""

    def in_turn(self) -> Iterator[SequenceState]:
        """The requests that may be admitted, in order. There is at least one."""

    def reorder(
        self, candidates: Sequence[SequenceState], place: Callable[[SequenceState], float]
    ) -> Sequence[SequenceState]:
        """Order the first few requests in turn by place: the rank less the head start."""

    def victim(self, running: Iterable[SequenceState]) -> SequenceState:
        """The request to preempt when another one needs its pages."""

    def gives_way(self, running: Iterable[SequenceState]) -> SequenceState | None:
        """The running request to preempt in favour of a queued one, or None. The queue must not be empty."""

    def delivered(self, events: Iterable[Event]) -> None:
        """Account for the tokens and ends of requests."""


class OneQueue:
    """First in rank, first served. Preempted requests resume before any other is admitted. No request is preempted to
    give another one its place. At most `limit` new requests wait."""

    def __init__(self, limit: int | None = None) -> None:
        self.limit = limit
        self.clear()

    def __len__(self) -> int:
        return len(self.waiting) + len(self.preempted)

    def __iter__(self) -> Iterator[SequenceState]:
        return chain(self.preempted, self.waiting)

    def add(self, sequence: SequenceState) -> None:
        self.waiting.add(sequence)

    def put_back(self, sequence: SequenceState) -> None:
        preempted = sequence.request.state is RequestState.PREEMPTED
        (self.preempted if preempted else self.waiting).add(sequence, again=True)

    def remove(self, sequence: SequenceState) -> None:
        (self.preempted if sequence in self.preempted else self.waiting).remove(sequence)

    def clear(self) -> None:
        self.waiting, self.preempted = RequestQueue(self.limit), RequestQueue()

    def in_turn(self) -> Iterator[SequenceState]:
        return iter(self.preempted or self.waiting)

    def reorder(
        self, candidates: Sequence[SequenceState], place: Callable[[SequenceState], float]
    ) -> Sequence[SequenceState]:
        return sorted(candidates, key=place)

    def victim(self, running: Iterable[SequenceState]) -> SequenceState:
        """The last in rank: of the blocked requests if there are any, and otherwise of all."""
        return max(running, key=lambda each: (each.blocked_by is not None, each.key))

    def gives_way(self, running: Iterable[SequenceState]) -> SequenceState | None:
        return None

    def delivered(self, events: Iterable[Event]) -> None:
        pass

"""Seat: what the scheduler knows of a live request beyond what the request knows of itself. Line: seats in order."""

import bisect
from collections.abc import Iterator
from dataclasses import dataclass, field
from operator import attrgetter

from phase0_request.request import Request

Key = tuple[float, int]
_KEY = attrgetter("key")


@dataclass(slots=True, eq=False)
class Seat:
    """A live request, from submission until nothing of it is left in memory or in flight.

    A slice that is planned counts here at once, though its request moves on only when it is committed. So a step can be
    planned while another is on the device:

        request.computed <= planned <= known     what is computed; that and what is in flight; what there is to compute

    `known` counts a token that the device will yield as if it were there: computing it is the next slice. It does not
    count the last token a request may have, which nobody computes.
    """

    request: Request
    key: Key  # when it counts as having come, and its number: the order of who goes first, fixed for life
    known: int
    limit: int  # the tokens at which it ends by length
    planned: int = 0
    room: int = 0  # tokens it has pages for
    in_flight: int = 0  # slices planned and not committed
    stays: bool = False  # it runs, and is not about to be preempted
    awaits: "Seat | None" = None  # who computes pages that it wants too
    awaits_until: int = 0  # how many tokens of the other's prompt that takes

    def plan(self, length: int) -> None:
        """So many more of its tokens are in flight."""
        self.in_flight += 1
        self.planned += length
        if self.planned == self.known and self.known + 1 < self.limit:
            self.known += 1

    def catch_up(self, room: int) -> None:
        """Nothing of it is in flight, and it has pages for so many tokens."""
        self.planned, self.known, self.room, self.in_flight = self.request.computed, self.request.total, room, 0


@dataclass(slots=True)
class Line:
    """Seats in the order of their keys. They join anywhere and leave from anywhere. To find a place takes a binary
    search; to join at the end or leave from the front moves nobody else."""

    _seats: list[Seat] = field(default_factory=list)
    _head: int = 0  # those before it have left

    def __len__(self) -> int:
        return len(self._seats) - self._head

    def __iter__(self) -> Iterator[Seat]:
        return iter(self._seats[self._head :])

    @property
    def last(self) -> Seat:
        return self._seats[-1]

    def first(self, n: int) -> list[Seat]:
        """The first n, or all if they are fewer."""
        return self._seats[self._head : self._head + n]

    def add(self, seat: Seat) -> None:
        bisect.insort(self._seats, seat, lo=self._head, key=_KEY)

    def remove(self, seat: Seat) -> None:
        place = bisect.bisect_left(self._seats, seat.key, lo=self._head, key=_KEY)
        if place == len(self._seats) or self._seats[place] is not seat:
            raise ValueError(f"request {seat.request.id} is not in this line")
        if place > self._head:
            del self._seats[place]
            return
        self._head += 1
        if 2 * self._head > len(self._seats):
            del self._seats[: self._head]
            self._head = 0

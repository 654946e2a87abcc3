"""Residents: who has pages, who gets them, and who loses them when there are too few."""

from dataclasses import dataclass, field

from phase1_kv_pool.cache import KVCache
from phase5_continuous.seat import Line, Seat


@dataclass(slots=True)
class Residents:
    """A seat has a page table from `enter` until it is preempted, or has ended and nothing of it is in flight.

    What is in flight reads and writes pages. So who ends while it has a slice in flight keeps its pages until that has
    landed, and who is to be preempted then leaves only after it.

        running      takes part in steps; one of them may be `leaving`, and then takes part in no more
        landing      has ended and has a slice in flight
        preempted    has no pages, and is the first to get some again
    """

    cache: KVCache
    spare: int  # tokens for which there must be room besides, when somebody enters
    running: Line = field(default_factory=Line)
    preempted: Line = field(default_factory=Line)
    leaving: Seat | None = None
    landing: int = 0
    full: bool = False  # the last who wanted to enter did not fit, and no pages were released since
    preemptions: int = 0

    @property
    def expects_pages(self) -> bool:
        """Whether pages come back when what is in flight has landed."""
        return self.leaving is not None or self.landing > 0

    def enter(self, seat: Seat, now: float) -> bool:
        """A page table with room for all that is known of it. False, and nothing has changed, if there are too few."""
        request, cache = seat.request, self.cache
        cached = cache.attach(request)
        # region exercise 5.1
        spare = self.spare if self.running or self.landing else 0
        self.full = not cache.can_grow(request, request.total + spare)
        if self.full:
            cache.release(request)
            return False
        cache.grow(request, request.total)
        # endregion
        request.admit(now)
        if cached:
            request.advance(0, cached)
        seat.catch_up(room=len(cache.table(request)) * cache.page_size)
        seat.stays = True
        self.running.add(seat)
        return True

    def extend(self, seat: Seat) -> bool:
        """A page for its next token, from others if need be. False if it has to wait, or had to go itself."""
        tokens = seat.planned + 1
        while not self.cache.can_grow(seat.request, tokens):
            if self.expects_pages or len(self.running) == 1:
                return False
            # region exercise 5.2
            victim = self.running.last
            victim.stays = False
            if victim.in_flight:
                self.leaving = victim
            else:
                self.preempt(victim)
            # endregion
            if victim is seat:
                return False
        self.cache.grow(seat.request, tokens)
        seat.room += self.cache.page_size
        return True

    def preempt(self, seat: Seat) -> None:
        """Out, without pages. What it has said is kept: computing that again is a prompt like any other."""
        self.running.remove(seat)
        seat.request.preempt()
        seat.catch_up(room=0)
        self.preempted.add(seat)
        self.preemptions += 1
        self._release(seat)

    def end(self, seat: Seat) -> bool:
        """A running request has ended. True if that was all: nothing of it is in flight."""
        self.running.remove(seat)
        seat.stays = False
        if self.leaving is seat:
            self.leaving = None
        if seat.in_flight:
            self.landing += 1
            return False
        self._release(seat)
        return True

    def land(self, seat: Seat) -> None:
        """Nothing is in flight any more of one that has ended."""
        self.landing -= 1
        self._release(seat)

    def let_go(self) -> None:
        """Preempt who is to leave, if nothing of it is in flight any more."""
        seat = self.leaving
        if seat is not None and not seat.in_flight:
            self.leaving = None
            self.preempt(seat)

    def _release(self, seat: Seat) -> None:
        self.cache.release(seat.request)
        self.full = False

"""Admission: who waits, and who of them enters a step."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

from phase0_request.queue import QueueFullError
from phase0_request.request import Request
from phase3_chunked_prefill.chunker import Share
from phase5_continuous.policies import Policy
from phase5_continuous.residents import Residents
from phase5_continuous.seat import Line, Seat
from phase5_continuous.sharing import Prefilling

LOOK = 8  # how many that may enter are looked at in a row
FAR = 256  # and how far down a line they are looked for


@dataclass(slots=True)
class Admission:
    """Those who were preempted enter first, by rank; then those who wait, in the order of the policy.

    Who waits for a prefix that is being computed lets others pass, and so does a long prompt that cannot have a token
    of this step because long ones before it have used up what is theirs: those among the first FAR of the line. Who
    finds too few pages lets nobody pass: pages that come free are saved for it.
    """

    policy: Policy
    residents: Residents
    max_running: int
    max_chunk: int  # a prompt with more tokens is long
    queue_limit: int | None
    waiting: Line = field(default_factory=Line)
    prefilling: Prefilling = field(init=False)

    def __post_init__(self) -> None:
        self.prefilling = Prefilling(self.residents.cache)

    def wait(self, seat: Seat) -> None:
        """A new request joins those who wait. QueueFullError if too many do."""
        if self.queue_limit is not None and len(self.waiting) >= self.queue_limit:
            raise QueueFullError(self.queue_limit)
        self.waiting.add(seat)
        self.residents.full = False  # it may go before the one that did not fit

    @property
    def is_open(self) -> bool:
        """Whether there is a place, and a chance of pages, and someone to have them."""
        residents = self.residents
        if residents.full and (residents.running or residents.landing):
            return False
        return len(residents.running) < self.max_running and bool(residents.preempted or self.waiting)

    def wanted(self) -> Iterator[int]:
        """The tokens of the first who may enter the next step: of short prompts if there are any."""
        if self.is_open:
            line = self._line()
            for seat in self._first(line, longs=False) or self._first(line, longs=True):
                yield seat.known

    def admit(self, share: Share, now: float) -> Iterator[Seat]:
        """One after the other, as long as there are places and pages, and tokens are left."""
        moved = True
        while moved and self.is_open and share.left:
            moved, line = False, self._line()
            for seat in self._in_order(line, self._first(line, longs=share.offer(0, self.max_chunk + 1) > 0)):
                if not share.left or not self.is_open:
                    return
                if not share.offer(0, seat.known) or self.prefilling.is_coming(seat):
                    continue
                if self.residents.enter(seat, now):
                    line.remove(seat)
                    self.prefilling.add(seat)
                    moved = True
                    yield seat

    def _line(self) -> Line:
        return self.residents.preempted or self.waiting

    def _first(self, line: Line, longs: bool) -> list[Seat]:
        """The first few who may enter, for all that is known: also long prompts, or only short ones."""
        may_enter = (
            seat
            for seat in line.first(FAR)
            if (longs or seat.known <= self.max_chunk) and not self.prefilling.is_known_to_come(seat)
        )
        return list(islice(may_enter, LOOK))

    def _in_order(self, line: Line, first: list[Seat]) -> Sequence[Seat]:
        if line is not self.waiting:
            return first
        requests: list[Request] = [seat.request for seat in first]
        seats = {seat.request.id: seat for seat in first}
        return [seats[request.id] for request in self.policy.order(requests, self.residents.cache)]

"""Prefilling: whose prompts are being computed, so that nobody computes the same beside them."""

from dataclasses import dataclass, field

from phase1_kv_pool.cache import KVCache
from phase5_continuous.seat import Seat


@dataclass(slots=True)
class Prefilling:
    """A request whose next page of prompt is being computed for another waits for it: then it is cached.

    It waits for one that runs and moves on in every few steps, until all pages that they have in common are computed.
    If the other leaves, it stops waiting. With a cache that does not share, nobody waits, and neither does who could
    not use them, because its prompt is to be scored.
    """

    cache: KVCache
    _seats: list[Seat] = field(default_factory=list)

    def add(self, seat: Seat) -> None:
        """Its prompt begins to be computed."""
        if self.cache.shares:
            self._seats = [other for other in self._seats if _computes(other, len(other.request.prompt_tokens))]
            self._seats.append(seat)

    def is_coming(self, seat: Seat) -> bool:
        """Whether the first page that a seat lacks is being computed for another."""
        seat.awaits = self._computing_for(seat) if self._seats else None
        return seat.awaits is not None

    def is_known_to_come(self, seat: Seat) -> bool:
        """The same, if it was found before. Nothing is looked up."""
        other = seat.awaits
        return other is not None and _computes(other, seat.awaits_until)

    def _computing_for(self, seat: Seat) -> Seat | None:
        mine, page = seat.request.prompt_tokens, self.cache.page_size
        salt, start = seat.request.cache_salt, mine[:page]
        alike = [
            other
            for other in self._seats
            if other.request.prompt_tokens[:page] == start and other.request.cache_salt == salt
        ]
        if not alike:
            return None
        until = self.cache.cached_tokens(seat.request) + page
        usable = min(len(mine) - 1, seat.request.cacheable_tokens)  # its last token it computes itself
        for other in alike:
            theirs = other.request.prompt_tokens
            if until <= usable and _computes(other, until) and theirs[:until] == mine[:until]:
                while until + page <= usable and theirs[until : until + page] == mine[until : until + page]:
                    until += page
                seat.awaits_until = until
                return other
        return None


def _computes(seat: Seat, until: int) -> bool:
    """Whether it runs, and has yet to compute some of its first tokens."""
    return seat.stays and seat.request.computed < until

"""Prefilling: whose prompts are being computed, so that nobody computes the same beside them."""

from dataclasses import dataclass, field

from phase1_kv_pool.cache import KVCache
from phase5_continuous.seat import Seat


@dataclass(slots=True)
class Prefilling:
    """A request whose next page of prompt is being computed for another waits for it: then it is cached.

    It waits for one that runs and moves on in every few steps, page by page, and no longer than they have pages in
    common. If the other leaves, it stops waiting. With a cache that does not share, nobody waits.
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
        other = seat.awaits
        if other is not None and _computes(other, seat.awaits_until):
            return True
        seat.awaits = self._computing_for(seat) if self._seats else None
        return seat.awaits is not None

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
        if until >= len(mine):  # its last token it computes itself
            return None
        for other in alike:
            if _computes(other, until) and other.request.prompt_tokens[:until] == mine[:until]:
                seat.awaits_until = until
                return other
        return None


def _computes(seat: Seat, until: int) -> bool:
    """Whether it runs, and has yet to compute some of its first tokens."""
    return seat.stays and seat.request.computed < until

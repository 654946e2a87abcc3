"""KVCache: whose tokens lie where. The one view of memory that a scheduler has."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from phase0_request.batch import Slice
from phase0_request.request import Request
from phase1_kv_pool.allocator import OutOfPagesError, PageAllocator, PageError


@dataclass(frozen=True, slots=True)
class Usage:
    """Where the pages are. The three are disjoint and add up to all of them."""

    total: int
    free: int
    referenced: int  # named by the table of a live request
    cached: int = 0  # named by none, kept because their tokens may be asked for again

    @property
    def share_used(self) -> float:
        """The share of the pool that live requests hold."""
        return self.referenced / self.total


class KVCache(Protocol):
    """What the scheduler asks of memory. Phase 1 answers plainly; phase 4 answers the same and shares prefixes."""

    page_size: int
    shares: bool  # whether what one request has computed can serve another

    @property
    def max_tokens(self) -> int:
        """The longest request that could ever fit, alone in the pool."""
        ...

    def cached_tokens(self, request: Request) -> int:
        """How many of its tokens `attach` would find there already, if it were called now. Changes nothing."""
        ...

    def attach(self, request: Request) -> int:
        """Open a page table for a request. Returns how many of its tokens are there already."""
        ...

    def can_grow(self, request: Request, tokens: int) -> bool:
        """Whether `grow` would succeed now."""
        ...

    def grow(self, request: Request, tokens: int) -> None:
        """Make room so that the request has slots for its first `tokens` tokens: all of them, or OutOfPagesError."""
        ...

    def slots(self, piece: Slice) -> list[int]:
        """Where the tokens of a slice go: a slot is page * page_size + offset."""
        ...

    def table(self, request: Request) -> Sequence[int]:
        """The request's pages in the order of its tokens."""
        ...

    def publish(self, request: Request) -> None:
        """The request's first `computed` tokens lie in its pages now: what of them is full may be shared. May exchange
        pages of its table for others that hold the same, so tables are read afresh for every step."""
        ...

    def release(self, request: Request) -> None:
        """Close the page table: the request holds nothing any more."""
        ...

    @property
    def usage(self) -> Usage: ...

    def check(self) -> None:
        """Raise PageError unless pages and tables agree."""
        ...


class PagedCache:
    """The plain KVCache: every request has pages of its own, and gives them back when it leaves."""

    shares = False

    def __init__(self, num_pages: int, page_size: int = 16) -> None:
        if isinstance(page_size, bool) or not isinstance(page_size, int) or page_size < 1:
            raise ValueError(f"page_size must be an integer from 1, got {page_size!r}")
        self.page_size = page_size
        self.allocator = PageAllocator(num_pages)
        self._tables: dict[str, list[int]] = {}

    @property
    def max_tokens(self) -> int:
        return self.allocator.num_pages * self.page_size

    def cached_tokens(self, request: Request) -> int:
        return 0

    def attach(self, request: Request) -> int:
        if request.id in self._tables:
            raise PageError(f"request {request.id} has a page table already")
        self._tables[request.id] = []
        return 0

    def can_grow(self, request: Request, tokens: int) -> bool:
        return self._missing(request, tokens) <= self.allocator.num_free

    def grow(self, request: Request, tokens: int) -> None:
        # region exercise 1.4
        missing = self._missing(request, tokens)
        if missing > 0:
            self._tables[request.id] += self.allocator.allocate(missing)
        # endregion

    def slots(self, piece: Slice) -> list[int]:
        table, size = self.table(piece.request), self.page_size
        if piece.stop > len(table) * size:
            room = f"{len(table) * size} tokens, not for {piece.start} to {piece.stop}"
            raise PageError(f"request {piece.request.id} has room for {room}")
        # region exercise 1.5
        return [table[position // size] * size + position % size for position in range(piece.start, piece.stop)]
        # endregion

    def table(self, request: Request) -> list[int]:
        try:
            return self._tables[request.id]
        except KeyError:
            raise PageError(f"request {request.id} has no page table; attach it first") from None

    def publish(self, request: Request) -> None:
        self.table(request)  # that it has one is all there is to say: nothing is shared here

    def release(self, request: Request) -> None:
        self.allocator.release(self.table(request))
        del self._tables[request.id]

    @property
    def usage(self) -> Usage:
        allocator = self.allocator
        return Usage(total=allocator.num_pages, free=allocator.num_free, referenced=allocator.num_used)

    def check(self) -> None:
        self.allocator.check()
        held = [page for table in self._tables.values() for page in table]
        if len(held) != len(set(held)):
            raise PageError("a page is in two tables, or twice in one")
        if len(held) != self.allocator.num_used:
            raise PageError(f"{self.allocator.num_used} pages are in use, but tables name {len(held)}")
        for page in held:
            if self.allocator.count(page) != 1:
                raise PageError(f"page {page} is in one table and has {self.allocator.count(page)} users")

    def _missing(self, request: Request, tokens: int) -> int:
        """How many pages a request lacks for so many tokens; below 1, none."""
        if tokens < 0:
            raise ValueError(f"request {request.id} cannot have {tokens} tokens")
        return -(-tokens // self.page_size) - len(self.table(request))


__all__ = ["KVCache", "OutOfPagesError", "PagedCache", "Usage"]

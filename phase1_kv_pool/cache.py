"""PagedCache: page tables of requests, and the scheduler's only view of KV memory."""

from collections.abc import Iterable, Iterator, Sequence
from heapq import heappop, heappush
from typing import NamedTuple

from phase0_request.batch import Slice
from phase0_request.request import Request
from phase0_request.support.checks import check_int
from phase1_kv_pool.allocator import PageAllocator, PageError


class PageUsage(NamedTuple):
    """Page counts of a pool: free + referenced + cached = total."""

    total: int
    free: int
    referenced: int  # in the page table of at least one request
    cached: int = 0  # only in the prefix cache: in no page table, evictable


class CacheObserver:
    """Called when pages have entered or left a page table or the tree of a prefix cache, so that an observer knows
    which tables name each page. A method that it does not define does nothing."""

    def grown(self, request: Request, pages: Sequence[int]) -> object:
        """A page table has these new pages at its end. The first call for a request follows its `attach`."""

    def swapped(self, request: Request, first: int, pages: Sequence[int]) -> object:
        """From entry `first` on, a page table now names these pages of the tree, which hold the same tokens."""

    def released(self, request: Request) -> object:
        """A page table was closed. It may never have grown."""

    def stored(self, parent: int | None, pages: Sequence[int], tokens: Sequence[int], salt: str) -> object:
        """The tree has new pages with these tokens after page `parent`; after None, they begin a prefix."""

    def removed(self, pages: Sequence[int]) -> object:
        """Pages were evicted. So were all pages after them in the tree, now or earlier."""


class PagedCache:
    """Opens, grows, publishes and frees the page tables of requests. Here each request has its own pages; phase 4's
    PrefixCache, a subclass, shares the pages of common prefixes.

        attach     open a page table; a prefix cache fills it with the pages of the longest cached prefix
        grow       allocate and append pages, so that the next tokens have slots
        slots      the slot mapping of a slice, for the kernels
        publish    offer the full pages of computed tokens to the prefix cache
        release    free the page table

    The device has a copy of the open page tables, one in each row. `changed` says what the copy lacks: by request id,
    the first entry that was added or replaced since the copy was last updated.
    """

    shares = False  # whether requests can share computed pages
    growth = 1  # pages of the pool that a long request takes for each page of its table

    def __init__(self, num_pages: int, page_size: int = 16) -> None:
        self.page_size = check_int("page_size", page_size, 1)
        self.allocator = PageAllocator(num_pages)
        self.changed: dict[str, int] = {}
        self.observers: list[CacheObserver] = []
        self.tables: dict[str, list[int]] = {}  # by request id
        self._rows: dict[str, int] = {}
        self._free_rows: list[int] = []  # a heap

    @property
    def max_tokens(self) -> int:
        """The number of tokens that the whole pool can hold: the limit for one request."""
        return self.allocator.num_pages * self.page_size

    def cached_tokens(self, request: Request) -> int:
        """The number of cached prefix tokens that `attach` would return now. Changes nothing."""
        return 0

    def awaited(self, request: Request, tokens: int) -> None:
        """Another request waits until this one has computed its first `tokens` tokens, which both have in common."""

    def attach(self, request: Request) -> int:
        """Open the page table of a request. Returns how many of its tokens are already cached."""
        if request.id in self.tables:
            raise PageError(f"request {request.id} has a page table already")
        self.tables[request.id] = []
        self._rows[request.id] = heappop(self._free_rows) if self._free_rows else len(self._rows)
        self.changed[request.id] = 0
        return 0

    def can_grow(self, request: Request, tokens: int) -> bool:
        """Whether `grow` would find enough pages now."""
        return self._missing(request, tokens) <= self.allocator.num_free

    # region exercise 1.3
    def grow(self, request: Request, tokens: int) -> None:
        """Allocate pages until the request has slots for its first `tokens` tokens.

        Raises OutOfPagesError, and allocates none, if fewer pages are available.
        """
        missing, table = self._missing(request, tokens), self.table(request)
        if missing > 0:
            pages = self.allocator.allocate(missing)
            self.changed.setdefault(request.id, len(table))
            table += pages
            for observer in self.observers:
                observer.grown(request, pages)

    def slots(self, part: Slice) -> list[int]:
        """The slot of each token of a slice: page * page_size + offset."""
        request, start, length, _ = part
        table, size, stop = self.table(request), self.page_size, start + length
        if stop > len(table) * size:
            room = f"{len(table) * size} tokens, not for {start} to {stop}"
            raise PageError(f"request {request.id} has room for {room}")
        if length == 1:
            return [table[start // size] * size + start % size]
        return [table[position // size] * size + position % size for position in range(start, stop)]

    # endregion

    def has_table(self, request: Request) -> bool:
        return request.id in self.tables

    def table(self, request: Request) -> list[int]:
        """The page table of a request: its pages in the order of its tokens."""
        try:
            return self.tables[request.id]
        except KeyError:
            raise PageError(f"request {request.id} has no page table; attach it first") from None

    def row(self, request: Request) -> int:
        """The row of a page table on the device: the lowest that was free when the table was opened."""
        self.table(request)  # raises without a page table
        return self._rows[request.id]

    def changes(self) -> Iterator[tuple[int, int, Sequence[int]]]:
        """The row, the first changed entry and the pages from there on, of each request in `changed`."""
        return ((self._rows[name], first, self.tables[name][first:]) for name, first in self.changed.items())

    def copied(self) -> None:
        """Note that the device has these changes: the runner has launched a step that copies them."""
        self.changed.clear()

    def publish(self, request: Request) -> None:
        """Offer the request's full pages of computed tokens to the prefix cache.

        May replace pages of its table by cached pages with the same content, so read the table again at every step.
        """
        self.table(request)  # raises without a page table; there is no prefix cache here

    def release(self, request: Request) -> None:
        """Close the page table of a request and free the pages that it does not share."""
        self.allocator.release(self.table(request))
        del self.tables[request.id]
        heappush(self._free_rows, self._rows.pop(request.id))
        self.changed.pop(request.id, None)
        for observer in self.observers:
            observer.released(request)

    def release_all(self, requests: Iterable[Request]) -> None:
        """Close the page table of each request that has one."""
        for request in requests:
            if self.has_table(request):
                self.release(request)

    @property
    def usage(self) -> PageUsage:
        return PageUsage(self.allocator.num_pages, self.allocator.num_free, self.allocator.num_used)

    # region exercise 1.3
    def _missing(self, request: Request, tokens: int) -> int:
        """The number of pages that a request lacks for `tokens` tokens; 0 or less if it has enough."""
        if tokens < 0:
            raise ValueError(f"request {request.id} cannot have {tokens} tokens")
        return -(-tokens // self.page_size) - len(self.table(request))

    # endregion

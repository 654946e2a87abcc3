"""WindowedCache: page tables for each group of layers. A windowed group frees the pages before the window.

The core's page tables name *logical* pages here: each is the place of page_size tokens. A logical page has a *physical*
page, one of the pool's, for each group of layers: for the full groups as long as it lives, for the windowed groups as
long as a request needs it. Nothing in the core differs: it allocates, shares and frees logical pages.

A request holds the windowed pages of one span of its tokens: those in the window of its next token, and those that are
computed before the next commit. A span has a fixed length. So a request that has its pages needs no more when the span
moves on, and a long prompt cannot fail half-way. It moves when tokens are committed: a step in flight, or one that is
planned again after drafts were rejected, finds all pages that it reads.
"""

from collections.abc import Iterator, Sequence
from itertools import chain

from phase0_request.batch import Slice
from phase0_request.request import Request
from phase1_kv_pool.allocator import OutOfPagesError, PageAllocator, PageError
from phase1_kv_pool.cache import PagedCache, PageUsage
from phase1_kv_pool.extras.layer_groups import LayerGroups

MORE = 7  # logical pages for each physical one


class LogicalPages(PageAllocator):
    """Logical pages, and the physical pages of each: of the full groups, and of the windowed groups."""

    def __init__(self, num_pages: int) -> None:
        """At first there are as many logical pages as physical ones."""
        super().__init__(num_pages)
        self.memory = PageAllocator(num_pages)
        self.full: dict[int, list[int]] = {}
        self.windowed: dict[int, list[int]] = {}

    def extend(self, n: int) -> None:
        """Add n free pages."""
        self.free[:0] = range(self.num_pages + n - 1, self.num_pages - 1, -1)
        self.counts += [0] * n
        self.num_pages += n

    def release(self, pages: Sequence[int]) -> int:
        """A logical page that becomes free has no physical pages."""
        freed = super().release(pages)
        for page in pages if freed else ():
            if not self.counts[page]:
                self.memory.release(self.full.pop(page, ()))
                self.free_windowed(page)
        return freed

    def free_windowed(self, page: int) -> None:
        self.memory.release(self.windowed.pop(page, ()))


class WindowedCache(PagedCache):
    """A PagedCache of logical pages. Counts of pages, such as `usage`, are of physical ones.

    On the device, an entry of a page table has a physical page for each group, one after the other. An entry that the
    windowed groups cannot reach names the `null` page, which is not in use: it is never written.
    """

    def __init__(self, groups: LayerGroups, num_pages: int, page_size: int = 16) -> None:
        super().__init__(num_pages, page_size)
        self.groups = groups
        self.allocator = self.pages = LogicalPages(num_pages)
        if not groups.full:  # pages before the window take no memory: the tree may remember as many more
            self.pages.extend(MORE * num_pages)
        self.null, self.growth = num_pages, max(groups.full, 1)
        self.before, self.span = groups.pages_before(page_size), groups.span(page_size)
        self.first: dict[str, int] = {}  # by request id: where its span begins
        self.holders: dict[int, int] = {}  # of each logical page in a span: how many requests have it in theirs
        self.debt = 0  # the sum of all holders after the first; each is a page that another request may come to need
        self.moved: dict[str, list[int]] = {}  # by request id: entries whose windowed pages have changed

    @property
    def max_tokens(self) -> int:
        """The longest request that fits. Where all layers have windows, the pool does not limit it."""
        return self.groups.tokens_in(self.pages.memory.num_pages, self.page_size)

    @property
    def usage(self) -> PageUsage:
        """Each request pays for its whole span, also for what it shares, because it leaves a shared page without
        freeing it, and needs another. Such a page counts as referenced before it is taken."""
        memory, evictable, owed = self.pages.memory, self._evictable, self.groups.windowed * self.debt
        cached = max(evictable - owed, 0)
        free = memory.num_free + min(evictable - owed, 0)
        return PageUsage(memory.num_pages, free, memory.num_pages - free - cached, cached)

    @property
    def available(self) -> int:
        """The number of pages that requests can get."""
        return self.pages.memory.num_free + self._evictable - self.groups.windowed * self.debt

    @property
    def _evictable(self) -> int:
        return 0

    def attach(self, request: Request) -> int:
        cached = super().attach(request)
        table = self.table(request)
        self.first[request.id] = max(len(table) - self.before, 0)
        for page in table[self.first[request.id] :]:
            self._hold(page)
        return cached

    def can_grow(self, request: Request, tokens: int) -> bool:
        return self.lacking(request, tokens) <= self.available

    def grow(self, request: Request, tokens: int) -> None:
        lacking, available = self.lacking(request, tokens), self.available
        if lacking > available:
            raise OutOfPagesError(lacking, available)
        if not super().can_grow(request, tokens):
            self.pages.extend(self._missing(request, tokens))
        start, groups = len(self.table(request)), self.groups
        super().grow(request, tokens)
        for page in self.table(request)[start:]:
            self.pages.full[page] = self._take(groups.full)
        span = self._span(request)
        self._back(request, range(max(start, span.start), span.stop))

    def slots(self, part: Slice) -> list[int]:
        """Slots in logical pages. The device derives the slots of each group from them."""
        if part.stop > (stop := self._span(part.request).stop * self.page_size):
            raise PageError(f"request {part.request.id} has windowed pages for {stop} tokens, not for {part.stop}")
        return super().slots(part)

    def publish(self, request: Request) -> None:
        """Then move the span of the request to its computed tokens."""
        self._publish(request)
        old = self._span(request)
        first = max(request.computed // self.page_size - self.before, old.start)
        passed = range(old.start, first)
        for index in passed:
            self._leave(request, index)
        self.first[request.id] = first
        added = range(old.stop, self._span(request).stop)
        self._back(request, added)
        self.moved.setdefault(request.id, []).extend([*passed, *added])

    def _publish(self, request: Request) -> None:
        super().publish(request)

    def release(self, request: Request) -> None:
        for index in self._span(request):
            self._leave(request, index)
        super().release(request)
        self.first.pop(request.id, None)
        self.moved.pop(request.id, None)

    def changes(self) -> Iterator[tuple[int, int, Sequence[int]]]:
        groups = self.groups
        for name, first in self.changed.items():
            entries = (self._entry(name, index) for index in range(first, len(self.tables[name])))
            yield self._rows[name], first * groups.count, [*chain.from_iterable(entries)]
        for name, moved in self.moved.items():
            for index in moved:
                yield self._rows[name], index * groups.count + groups.full, self._entry(name, index)[groups.full :]

    def copied(self) -> None:
        super().copied()
        self.moved.clear()

    def demand(self, request: Request, tokens: int) -> tuple[int, int]:
        """The pages that a request without a page table needs for this many tokens, and the pages available to it."""
        return self.groups.pages_for(tokens, self.page_size), self.available

    def span_of(self, name: str) -> range:
        """The entries of a request's page table that have windowed pages."""
        length = len(self.tables[name])
        first = self.first.get(name, length)  # an interrupt may have come before it was set
        return range(first, min(length, first + self.span))

    def _span(self, request: Request) -> range:
        self.table(request)  # raises without a page table
        return self.span_of(request.id)

    def _entry(self, name: str, index: int) -> list[int]:
        """The physical pages of an entry of a page table, by group."""
        page, groups = self.tables[name][index], self.groups
        in_span = self.first[name] <= index < self.first[name] + self.span
        return self.pages.full[page] + (self.pages.windowed[page] if in_span else [self.null] * groups.windowed)

    def lacking(self, request: Request, tokens: int) -> int:
        """The number of physical pages that a request lacks for `tokens` tokens."""
        missing, groups = max(self._missing(request, tokens), 0), self.groups
        span = self._span(request)
        stop = min(len(self.table(request)) + missing, span.start + self.span)
        return groups.full * missing + groups.windowed * (stop - span.stop)

    def _take(self, n: int) -> list[int]:
        """Allocate physical pages. They are available, by the counts above."""
        return self.pages.memory.allocate(n)

    def _back(self, request: Request, indices: range) -> None:
        """Give new entries of a span their windowed pages."""
        for index in indices:
            page = self.tables[request.id][index]
            self.pages.windowed[page] = self._take(self.groups.windowed)
            self._hold(page)

    def _hold(self, page: int) -> None:
        self.debt += page in self.holders
        self.holders[page] = self.holders.get(page, 0) + 1

    def _leave(self, request: Request, index: int) -> None:
        """Take an entry out of the span of a request."""
        page = self.tables[request.id][index]
        others = self.holders.pop(page, 1) - 1
        if others:
            self.holders[page] = others
            self.debt -= 1
        else:
            self._unheld(request, index)

    def _unheld(self, request: Request, index: int) -> None:
        """This entry of a request was the last one in a span that names its page."""
        self.pages.free_windowed(self.tables[request.id][index])

"""WindowedPrefixCache: a prefix cache whose pages may have lost their windowed part.

The tree is the core's, and names logical pages (`phase1_kv_pool.extras.windows`). A cached page can lose its windowed
part before the page itself is evicted: a match needs that part only of its last pages, which the window of the next
token reaches. So a match is cut where these are not all there.

What is evicted first decides what can be found again. Pages that a request has passed over on its way come first, since
only a request that branches off there would use them. The end of a request, and of a match or of
a prefix that had to be computed twice, is kept for as long as the leaves of the tree that were used at that time.
"""

from phase0_request.request import Request
from phase1_kv_pool.cache import PagedCache
from phase1_kv_pool.extras.checkpoints import CheckpointedLayout
from phase1_kv_pool.extras.layer_groups import GroupedLayout, LayerGroups
from phase1_kv_pool.extras.windows import WindowedCache
from phase1_kv_pool.layout import KVLayout
from phase4_radix.eviction import EvictionQueue
from phase4_radix.extras.checkpoints import CheckpointedPrefixCache
from phase4_radix.prefix_cache import PrefixCache
from phase4_radix.radix_tree import Match

PASSED = 1 << 40  # earlier than any leaf was used


def cache_for(layout: KVLayout, pages: int, shares: bool) -> PagedCache:
    """The cache of a pool with this layout; with `shares`, a prefix cache."""
    if isinstance(layout, CheckpointedLayout) and shares:
        return CheckpointedPrefixCache(layout.slots_for(pages), pages, layout.page_size)
    if isinstance(layout, GroupedLayout) and layout.groups is not None:
        return (WindowedPrefixCache if shares else WindowedCache)(layout.groups, pages, layout.page_size)
    return (PrefixCache if shares else PagedCache)(pages, layout.page_size)


class WindowedPrefixCache(WindowedCache, PrefixCache):
    """A PrefixCache of logical pages. The windowed part of each is free, held by requests, or cached: evictable."""

    def __init__(self, groups: LayerGroups, num_pages: int, page_size: int = 16) -> None:
        super().__init__(groups, num_pages, page_size)
        self.unheld = EvictionQueue()  # logical pages in the tree whose windowed pages are in no span
        self.times: dict[int, int] = {}  # the last use of each, for that queue
        self.reused: set[int] = set()  # logical pages that a match has used, or that were the end of a prefix
        self.repeats: set[str] = set()  # requests that have computed cached tokens again, up to now

    @property
    def _evictable(self) -> int:
        return self.groups.full * self.tree.num_evictable + self.groups.windowed * len(self.unheld)

    def match(self, request: Request) -> Match:
        """The longest cached prefix at whose end the whole window is cached."""
        match = super().match(request)
        length = self._usable(match.pages)
        if length == len(match.pages):
            return match
        return self.tree.match(request.tokens(0, length * self.page_size), request.cache_salt)

    def _usable(self, pages: list[int]) -> int:
        """How many of these pages of a prefix a request can begin with."""
        length = index = len(pages)
        while index > max(length - self.before, 0):
            index -= 1
            if pages[index] not in self.pages.windowed:
                length = index
        return length

    def demand(self, request: Request, tokens: int) -> tuple[int, int]:
        cached, groups, pages = self.match(request).pages, self.groups, -(-tokens // self.page_size)
        first = max(len(cached) - self.before, 0)
        needed = groups.windowed * (min(pages, first + self.span) - len(cached))
        needed += groups.full * (pages - len(cached))
        locked = sum(self.allocator.count(page) == 1 for page in cached)  # its page table would lock them
        return needed, self.available - groups.full * locked - groups.windowed * (len(cached) - first)

    def grow(self, request: Request, tokens: int) -> None:
        handle = self.handles[request.id]
        matched = [] if handle.counted else self.table(request)[self.first[request.id] :]
        super().grow(request, tokens)
        self.reused.update(matched)

    def release(self, request: Request) -> None:
        handle, table, span = self.handles.get(request.id), self.table(request), self.span_of(request.id)
        super().release(request)
        self.repeats.discard(request.id)
        if handle is not None and handle.counted:
            for page in table[span.start : handle.published]:
                self.reused.add(page)
                if page not in self.holders:
                    self._cache_windowed(page, self.tree.nodes[handle.node].last_used)

    def reset(self) -> int:
        before = self.pages.memory.num_free
        super().reset()
        while self.unheld:
            self._evict_windowed()
        return self.pages.memory.num_free - before

    def _publish(self, request: Request) -> None:
        """Where the tree's page replaces one that was computed again, it takes over its windowed pages if it has lost
        its own."""
        start = self.handles[request.id].published
        own = self.table(request)[start : request.computed // self.page_size]
        self.allocator.share(own)
        PrefixCache.publish(self, request)
        windowed = self.pages.windowed
        table, first = self.table(request), self.first[request.id]
        for index, (page, cached) in enumerate(zip(own, table[start:], strict=False), start):
            if page == cached:
                if request.id in self.repeats:  # a request that branches off here finds the window before
                    self.repeats.remove(request.id)
                    self.reused.update(table[max(first, index - self.before) : index])
                break
            self.repeats.add(request.id)
            if index >= first:
                del self.holders[page]
                if cached not in windowed:
                    windowed[cached] = windowed.pop(page)
                self._hold(cached)
        self.allocator.release(own)

    def _hold(self, page: int) -> None:
        super()._hold(page)
        self.unheld.discard(page)

    def _unheld(self, request: Request, index: int) -> None:
        handle, page = self.handles.get(request.id), self.tables[request.id][index]
        if handle is None or index >= handle.published:  # it is not in the tree
            super()._unheld(request, index)
        elif handle.counted:
            time = self.tree.nodes[handle.node].last_used
            self._cache_windowed(page, time if page in self.reused else time - PASSED)
        else:  # the request was never admitted
            self._cache_windowed(page, self.times[page])

    def _cache_windowed(self, page: int, time: int) -> None:
        self.times[page] = time
        self.unheld.add(page, time)

    def _take(self, n: int) -> list[int]:
        while self.pages.memory.num_free < n:
            self._evict_next()
        return super()._take(n)

    def _evict_next(self) -> None:
        """Evict the windowed pages, or the leaf of the tree, that were used least recently."""
        self.counts.evictions += 1
        leaves, unheld = self.tree.leaves if self.groups.full else (), self.unheld
        if not unheld or (leaves and self.tree.nodes[leaves.oldest()].last_used <= self.times[unheld.oldest()]):
            self._evict(1)
        else:
            self._evict_windowed()

    def _evict_windowed(self) -> None:
        page = self.unheld.oldest()
        self._forget(page)
        self.pages.free_windowed(page)

    def _evict(self, count: int) -> int:
        pages = self.tree.evict(count)
        for page in pages:
            self._forget(page)
        for observer in self.observers if pages else ():
            observer.removed(pages)
        return self.allocator.release(pages)

    def _forget(self, page: int) -> None:
        self.unheld.discard(page)
        self.times.pop(page, None)
        self.reused.discard(page)

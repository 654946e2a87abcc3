"""PrefixCache: a paged KV cache that keeps computed pages when their request ends, for other requests to share."""

from dataclasses import dataclass

from phase0_request.batch import Slice
from phase0_request.request import Request
from phase1_kv_pool.allocator import OutOfPagesError, PageError
from phase1_kv_pool.cache import PagedCache, PageUsage
from phase4_radix.radix_tree import Match, RadixTree


@dataclass(slots=True)
class Counts:
    """Statistics of the cache since it was created."""

    queries: int = 0  # admitted requests; a preempted request counts again when it resumes
    query_tokens: int = 0  # their tokens at that moment
    hit_tokens: int = 0  # of these, tokens found in the cache
    evictions: int = 0  # pages evicted to make room
    duplicates: int = 0  # pages freed because another request had published the same tokens before

    @property
    def hit_rate(self) -> float:
        return self.hit_tokens / self.query_tokens if self.query_tokens else 0.0


@dataclass(slots=True)
class CacheHandle:
    """A request's lock on the tree: the path that holds the first pages of its page table."""

    node: int  # the locked node, where the path ends
    published: int  # pages of the table that are in the tree
    total: int  # tokens of the request when it was attached
    cached: int  # of these, the tokens found in the cache
    counted: bool = False  # whether it is in Counts


class PrefixCache(PagedCache):
    """A PagedCache with pages that can be shared and outlive their request. Each page is in one of three states:

        free        reference count 0
        cached      count 1, held by the tree alone: evicted when pages are needed
        referenced  in at least one page table; if it is in the tree too, that request has locked the path to it

    A page is published, that is, added to the tree, once all its tokens are computed. From then on it is read-only.
    """

    shares = True

    def __init__(self, num_pages: int, page_size: int = 16) -> None:
        super().__init__(num_pages, page_size)
        self.tree = RadixTree(page_size)
        self.counts = Counts()
        self.handles: dict[str, CacheHandle] = {}

    # Ownership of pages. The allocator counts references: one for each page table that names the page, one if the tree
    # holds it. A page is free when its count is 0, so no page needs to be freed explicitly.
    #
    #   attach    +1 for each page of the cached prefix: the new table names it
    #   grow       1 for each page allocated; if too few are free, the tree evicts
    #   publish   +1 for each page that is new to the tree
    #             for a duplicate: +1 for the tree's page, which replaces the request's own in the table; -1 for that
    #   release   -1 for each page of the table; the pages in the tree stay cached
    #   evict     -1 for each page that leaves the tree; it was unlocked, so no table names it

    # region exercise 4.8
    def attach(self, request: Request) -> int:
        """Open a page table that starts with the longest cached prefix, in whole pages, and lock that prefix. Returns
        its number of tokens, over which the request advances."""
        super().attach(request)
        match = self.match(request)
        node = self.tree.split(match)
        self.tree.lock(node)
        self.allocator.share(match.pages)
        self.tables[request.id] = match.pages
        cached = len(match.pages) * self.page_size
        self.handles[request.id] = CacheHandle(node, len(match.pages), request.total, cached)
        return cached

    # endregion

    def cached_tokens(self, request: Request) -> int:
        """How many tokens `attach` would find now. Read-only."""
        return len(self.match(request).pages) * self.page_size

    def can_grow(self, request: Request, tokens: int) -> bool:
        return self._missing(request, tokens) <= self.allocator.num_free + self.tree.num_evictable

    def grow(self, request: Request, tokens: int) -> None:
        missing = self._missing(request, tokens)
        room = self.allocator.num_free + self.tree.num_evictable
        if missing > room:
            raise OutOfPagesError(missing, room)
        self.counts.evictions += self._evict(missing - self.allocator.num_free)
        super().grow(request, tokens)
        handle = self.handles[request.id]
        if not handle.counted:  # a request that found no room was never admitted
            handle.counted = True
            self.counts.queries += 1
            self.counts.query_tokens += handle.total
            self.counts.hit_tokens += handle.cached

    def slots(self, part: Slice) -> list[int]:
        request, start, *_ = part
        handle = self.handles.get(request.id)
        if handle is not None and start < handle.published * self.page_size:
            page = self.table(request)[start // self.page_size]
            raise PageError(f"request {request.id} cannot write token {start}: page {page} is published")
        return super().slots(part)

    def publish(self, request: Request) -> None:
        """Add the pages that have become full to the tree. Where the tree already has the same tokens, the table
        switches to the tree's pages, and the request's own are released."""
        table, handle = self.table(request), self.handles[request.id]
        full = request.computed // self.page_size
        if full <= handle.published:
            return
        if full > len(table):
            raise PageError(f"request {request.id} has computed {request.computed} tokens, with {len(table)} pages")
        tokens = request.tokens(handle.published * self.page_size, full * self.page_size)
        own = table[handle.published : full]
        # region exercise 4.9
        node, known = self.tree.insert(tokens, own, request.cache_salt, after=handle.node)
        self.allocator.share([*known, *own[len(known) :]])  # known pages: this table; the others: the tree
        table[handle.published : handle.published + len(known)] = known
        self.allocator.release(own[: len(known)])
        # endregion
        if known:
            self.changed[request.id] = min(handle.published, self.changed.get(request.id, handle.published))
            for observer in self.observers:
                observer.swapped(request, handle.published, known)
        # region exercise 4.9
        self.tree.lock(node)
        self.tree.unlock(handle.node, used=False)  # insert has marked the path as used
        # endregion
        handle.node, handle.published = node, full
        self.counts.duplicates += len(known)
        first = full - len(own) + len(known)  # of the pages that are new in the tree
        if self.observers and first < full:
            parent = table[first - 1] if first else None
            for observer in self.observers:
                observer.stored(parent, table[first:full], tokens[len(known) * self.page_size :], request.cache_salt)

    def release(self, request: Request) -> None:
        """Close the page table and unlock its prefix. Published pages stay cached, and can be evicted once no request
        has them locked. A request that was attached but never grew leaves the cache unchanged."""
        super().release(request)
        handle = self.handles.pop(request.id, None)
        if handle is not None:  # else an interrupt came before its prefix was locked
            self.tree.unlock(handle.node, used=handle.counted)

    def reset(self) -> int:
        """Evict every page that no request uses. Returns the number of pages freed."""
        return self._evict(self.tree.num_evictable)

    @property
    def usage(self) -> PageUsage:
        total, free, cached = self.allocator.num_pages, self.allocator.num_free, self.tree.num_evictable
        return PageUsage(total=total, free=free, referenced=total - free - cached, cached=cached)

    def _evict(self, count: int) -> int:
        """Evict up to `count` pages from the tree. Returns the number of pages freed."""
        pages = self.tree.evict(count)
        if pages:
            for observer in self.observers:
                observer.removed(pages)
        return self.allocator.release(pages)

    # region exercise 4.8
    def match(self, request: Request) -> Match:
        """The longest cached prefix that leaves the request at least one token to compute."""
        last = request.total - 1  # its logits yield the next token, so it is computed even if it is cached
        return self.tree.match(request.tokens(0, min(last, request.cacheable_tokens)), request.cache_salt)

    # endregion

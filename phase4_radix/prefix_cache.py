"""PrefixCache: a KVCache whose pages outlive their requests. What was computed is found by whoever begins alike."""

from collections import Counter
from dataclasses import dataclass

from phase0_request.batch import Slice
from phase0_request.request import Request
from phase1_kv_pool.allocator import OutOfPagesError, PageError
from phase1_kv_pool.cache import PagedCache, Usage
from phase4_radix.radix_tree import Match, RadixTree


@dataclass(slots=True)
class Counts:
    """What the cache was asked and what came of it, since it was made."""

    queries: int = 0  # requests that came and got room; one that was preempted comes again
    query_tokens: int = 0  # the tokens they had then
    hit_tokens: int = 0  # those of them that were there already
    evictions: int = 0  # pages forgotten to make room
    duplicates: int = 0  # pages given back because another request had published the same before

    @property
    def hit_rate(self) -> float:
        return self.hit_tokens / self.query_tokens if self.query_tokens else 0.0


@dataclass(slots=True)
class Held:
    """What a request holds of the tree: a locked path, in whose pages its first tokens lie."""

    node: int  # where the path ends
    published: int  # pages; the first so many of its table are the path's
    asked: int  # tokens it had when it came
    found: int  # those of them that were there already
    counted: bool = False


class PrefixCache(PagedCache):
    """A PagedCache that remembers. The tree is one more user of every page that it names.

        free        count 0
        cached      count 1, the tree's: named by no table, and evicted when room is needed
        referenced  a table names it; if the tree does too, the table's request has the path to it locked

    A page is published when it is full and all of it is computed, and is never written again.
    """

    shares = True

    def __init__(self, num_pages: int, page_size: int = 16) -> None:
        super().__init__(num_pages, page_size)
        self.tree = RadixTree(page_size)
        self.counts = Counts()
        self._held: dict[str, Held] = {}

    def attach(self, request: Request) -> int:
        """Open a page table with the longest cached prefix in it, in whole pages, and lock it. Returns its tokens; the
        request advances over them."""
        super().attach(request)
        match = self._match(request)
        node = self.tree.cut(match)
        self.tree.lock(node)
        self.allocator.share(match.pages)
        self._tables[request.id] = match.pages
        found = len(match.pages) * self.page_size
        self._held[request.id] = Held(node, len(match.pages), request.total, found)
        return found

    def cached_tokens(self, request: Request) -> int:
        """How many of its tokens `attach` would find now. Changes nothing."""
        return len(self._match(request).pages) * self.page_size

    def found(self, request: Request) -> int:
        """How many of its tokens were there when it came. Asked while it has a page table."""
        self.table(request)
        return self._held[request.id].found

    def can_grow(self, request: Request, tokens: int) -> bool:
        return self._missing(request, tokens) <= self.allocator.num_free + self.tree.num_evictable

    def grow(self, request: Request, tokens: int) -> None:
        missing = self._missing(request, tokens)
        room = self.allocator.num_free + self.tree.num_evictable
        if missing > room:
            raise OutOfPagesError(missing, room)
        self.counts.evictions += self._forget(missing - self.allocator.num_free)
        super().grow(request, tokens)
        self._count(self._held[request.id])

    def slots(self, piece: Slice) -> list[int]:
        table, held = self.table(piece.request), self._held[piece.request.id]
        if piece.start < held.published * self.page_size:
            page = table[piece.start // self.page_size]
            raise PageError(f"request {piece.request.id} cannot write token {piece.start}: page {page} is published")
        return super().slots(piece)

    def publish(self, request: Request) -> None:
        """Share the pages that have become full. Where the tree knows the same tokens already, its pages take the place
        of the request's own, which are given back once nothing names them."""
        table, held = self.table(request), self._held[request.id]
        full = request.computed // self.page_size
        if full <= held.published:
            return
        if full > len(table):
            raise PageError(f"request {request.id} has computed {request.computed} tokens, with {len(table)} pages")
        tokens = request.tokens(held.published * self.page_size, full * self.page_size)
        # region exercise 4.4
        own = table[held.published : full]
        node, _, known = self.tree.insert(tokens, own, request.cache_salt, after=held.node)
        self.allocator.share([*known, *own[len(known) :]])  # known: one more table; the others: the tree
        table[held.published : held.published + len(known)] = known
        self.allocator.release(own[: len(known)])
        # endregion
        self.tree.lock(node)
        self.tree.unlock(held.node, used=False)  # the insert was the use
        held.node, held.published = node, full
        self.counts.duplicates += len(known)

    def release(self, request: Request) -> None:
        """Close the page table. What was published stays, and can be evicted once nobody has it locked. Of a request
        that never got room nothing stays: the cache is as it was before it came."""
        super().release(request)
        held = self._held.pop(request.id)
        self.tree.unlock(held.node, used=held.counted)

    def reset(self) -> int:
        """Forget everything that no request uses. Returns how many pages that freed."""
        return self._forget(self.tree.num_evictable)

    @property
    def usage(self) -> Usage:
        total, free, cached = self.allocator.num_pages, self.allocator.num_free, self.tree.num_evictable
        return Usage(total=total, free=free, referenced=total - free - cached, cached=cached)

    def check(self) -> None:
        """Raise PageError unless pages, tables and tree agree: who names a page is who is counted as its user."""
        self.allocator.check()
        self.tree.check()
        branches = {branch.node: branch for branch in self.tree.branches()}
        shared = {page for branch in branches.values() for page in branch.pages}
        users = Counter(page for table in self._tables.values() for page in table) + Counter(shared)
        for page in range(self.allocator.num_pages):
            if self.allocator.count(page) != users[page]:
                raise PageError(f"page {page} is named {users[page]} times and has {self.allocator.count(page)} users")
        own = [page for name, held in self._held.items() for page in self._tables[name][held.published :]]
        if len(own) != len(set(own)) or not shared.isdisjoint(own):
            raise PageError("a page that is not published is named twice")
        locks: Counter[int] = Counter()
        for name, held in self._held.items():
            path = self.tree.path(held.node)
            locks.update(path)
            if self._tables[name][: held.published] != [page for node in path for page in branches[node].pages]:
                raise PageError(f"request {name} has locked other pages than those its table begins with")
        for branch in branches.values():
            if branch.locks != locks[branch.node]:
                raise PageError(
                    f"node {branch.node} has {branch.locks} locks, and {locks[branch.node]} requests hold it"
                )

    def _match(self, request: Request) -> Match:
        """The longest cached prefix that the request may use: something is left for it to compute."""
        settled = request.cacheable_tokens  # so many of its first tokens others may compute for it
        # region exercise 4.5
        last = request.total - 1  # computing this one yields the next token, so it is computed whatever is cached
        return self.tree.match(request.tokens(0, min(last, settled)), request.cache_salt)
        # endregion

    def _forget(self, pages: int) -> int:
        return self.allocator.release(self.tree.evict(pages)) if pages > 0 else 0

    def _count(self, held: Held) -> None:
        """A request that has been given room is a query: one that was only tried, and put back, is none."""
        if not held.counted:
            held.counted = True
            self.counts.queries += 1
            self.counts.query_tokens += held.asked
            self.counts.hit_tokens += held.found

"""Checks of what holds between any two calls of a cache. Slow: for tests and for `--check-invariants`."""

from collections import Counter
from collections.abc import Set

from phase1_kv_pool.allocator import PageAllocator, PageError
from phase1_kv_pool.cache import PagedCache


def check_allocator(allocator: PageAllocator) -> None:
    """Raise PageError unless every page is either in use or on the free stack exactly once."""
    free = set(allocator.free)
    if len(free) != len(allocator.free):
        raise PageError("a page is on the free stack twice")
    for page, count in enumerate(allocator.counts):
        if (page in free) != (count == 0):
            raise PageError(f"page {page} has {count} users and is {'' if page in free else 'not '}free")
    if foreign := free - set(range(allocator.num_pages)):
        raise PageError(f"foreign pages on the free stack: {sorted(foreign)}")


def check_counts(cache: PagedCache, cached: Set[int] = frozenset()) -> None:
    """Raise PageError unless every page's reference count equals the page tables that name it. Each of the `cached`
    pages has one more reference, and may be in many tables."""
    check_allocator(cache.allocator)
    tables = Counter(page for table in cache.tables.values() for page in table)
    for page in range(cache.allocator.num_pages):
        if tables[page] > 1 and page not in cached:
            raise PageError(f"page {page} is not cached, and in two tables or twice in one")
        references, count = tables[page] + (page in cached), cache.allocator.count(page)
        if count != references:
            raise PageError(f"page {page} has {references} references and a count of {count}")

"""Checks of what holds between any two calls of a cache. Slow: for tests and for `--check-invariants`."""

from collections import Counter
from collections.abc import Set

from phase1_kv_pool.allocator import PageAllocator, PageError
from phase1_kv_pool.cache import PagedCache
from phase1_kv_pool.extras.windows import WindowedCache


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


def check_windows(cache: WindowedCache, unheld: Set[int] = frozenset()) -> None:
    """Raise PageError unless each physical page is free, or belongs to one group of one logical page that needs it.

    In a full group, pages in use need one; in a windowed group, pages in the span of a request, and the `unheld` pages
    of a prefix cache.
    """
    pages, groups = cache.pages, cache.groups
    check_allocator(pages.memory)
    owned = [page for owner in (pages.full, pages.windowed) for each in owner.values() for page in each]
    used = [page for page, count in enumerate(pages.memory.counts) if count]
    if sorted(owned) != used or set(pages.memory.counts) > {0, 1}:
        raise PageError(f"physical pages {used} are in use, and logical pages have {sorted(owned)}")
    in_use = {page for page, count in enumerate(pages.counts) if count}
    held = Counter(cache.tables[name][index] for name in cache.first for index in cache.span_of(name))
    if {*pages.full} != in_use or {*pages.windowed} != held.keys() | unheld:
        raise PageError(f"pages {in_use} are in use, {held} in spans; {pages.full} and {pages.windowed} have memory")
    sizes = {*map(len, pages.full.values())}, {*map(len, pages.windowed.values())}
    if not (sizes[0] <= {groups.full} and sizes[1] <= {groups.windowed}):
        raise PageError(f"logical pages have {sizes} physical ones, of {groups.full} and {groups.windowed} groups")
    if held != cache.holders or cache.debt != held.total() - len(held) or not held.keys().isdisjoint(unheld):
        raise PageError(f"spans have the pages {held}, counted as {cache.holders}, {cache.debt} of them for later")
    if cache.available < 0:
        raise PageError(f"{-cache.available} more pages are promised to requests than can be had")

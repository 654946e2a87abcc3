"""Pages of the prefix cache: growing, evicting, releasing, statistics, and `check`."""

from collections.abc import Callable

import pytest

from phase0_request import Request
from phase1_kv_pool import PageError
from phase4_radix.extras.invariants import check_cache
from phase4_radix.extras.nodes import nodes_of
from phase4_radix.prefix_cache import PrefixCache
from tests.phase4_radix.steps import SIZE, admit, compute, finish


def test_a_request_that_never_grew_leaves_the_cache_unchanged(cache: PrefixCache) -> None:
    """No node, and no update of the LRU order."""
    for name, first in (("a", 0), ("b", 100)):
        request = admit(cache, name, range(first, first + 20))
        compute(cache, request)
        finish(cache, request)
    before = list(nodes_of(cache.tree))
    for length in range(1, 21):
        tried = Request("tried", tuple(range(length)))
        cache.attach(tried)
        cache.release(tried)
        check_cache(cache)
        after = list(nodes_of(cache.tree))
        assert after == before, f"a request of {length} tokens was attached and released, and the tree changed"
    cache.grow(admit(cache, "c", [200]), 7 * SIZE)
    assert cache.cached_tokens(Request("probe", tuple(range(20)))) == 0  # a was evicted first, since it was used first
    assert cache.cached_tokens(Request("probe", tuple(range(100, 120)))) == 16


def test_counts(cache: PrefixCache) -> None:
    assert cache.counts.hit_rate == 0.0
    a = admit(cache, "a", range(10))
    compute(cache, a)
    b = admit(cache, "b", range(20))
    compute(cache, b, 6)
    compute(cache, b)
    counts = cache.counts
    assert (counts.queries, counts.query_tokens, counts.hit_tokens) == (2, 30, 8)
    assert counts.hit_rate == 8 / 30
    tried = Request("tried", tuple(range(10)))
    for _ in range(3):  # a scheduler without room for it tries again
        cache.attach(tried)
        cache.release(tried)
    assert counts.queries == 2


def test_computed_tokens_without_pages_are_an_error(cache: PrefixCache) -> None:
    a = admit(cache, "a", range(10))
    cache.grow(a, 4)
    a.advance(0, 8)
    with pytest.raises(PageError, match="request a has computed 8 tokens, with 1 pages"):
        cache.publish(a)


@pytest.mark.parametrize(
    ("breakage", "message"),
    [
        (lambda c: c.allocator.share([0]), "page 0 has 3 references and a count of 4"),
        (lambda c: c.tables["b"].reverse(), "has locked other pages"),
        (lambda c: c.tree.lock(c.handles["a"].node), "references, from"),
        (lambda c: c.tree.unlock(c.handles["b"].node), "references, from"),
        (lambda c: setattr(c.handles["b"], "published", 1), "has locked other pages"),
        (lambda c: c.tables["b"].append(c.tables["a"][3]), "page 3 is not cached, and in two tables"),
    ],
)
def test_check_finds_corruption(cache: PrefixCache, breakage: Callable[[PrefixCache], object], message: str) -> None:
    compute(cache, admit(cache, "a", range(14)))
    compute(cache, admit(cache, "b", [*range(8), 60, 61, 62, 63, 64]))
    check_cache(cache)
    breakage(cache)
    with pytest.raises(PageError, match=message):
        check_cache(cache)

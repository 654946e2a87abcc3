from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from phase0_request import Request, Slice
from phase1_kv_pool import OutOfPagesError, PagedCache, PageError, PageUsage
from phase1_kv_pool.extras.invariants import check_counts
from tests.phase0_request.support import refused


def request(name: str = "r", prompt: int = 200) -> Request:
    return Request(name, (1,) * prompt)


@pytest.fixture
def cache() -> PagedCache:
    return PagedCache(num_pages=6, page_size=4)


@pytest.mark.proof
def test_a_page_table_grows_by_whole_pages(cache: PagedCache) -> None:
    a = request()
    assert (cache.cached_tokens(a), cache.attach(a)) == (0, 0), "there is no prefix cache"
    for tokens, pages in ((0, 0), (1, 1), (4, 1), (5, 2), (3, 2), (9, 3)):
        cache.grow(a, tokens)
        assert len(cache.table(a)) == pages, f"grown to {tokens} tokens, in pages of 4: the table is {cache.table(a)}"
    usage = cache.usage
    assert usage == PageUsage(total=6, free=3, referenced=3, cached=0), f"one request has 3 of 6 pages: {usage}"


def test_a_slot_is_page_times_size_plus_offset(cache: PagedCache) -> None:
    a, b = request("a"), request("b")
    cache.attach(a)
    cache.attach(b)
    for tokens in (4, 8):  # alternately, so that their pages interleave
        cache.grow(a, tokens)
        cache.grow(b, tokens)
    tables = cache.table(a), cache.table(b)
    assert tables == ([0, 2], [1, 3]), f"a and b grew in turns, a page at a time: their tables are {tables}"
    for part, wanted in (
        (Slice(a, 0, 8), [0, 1, 2, 3, 8, 9, 10, 11]),
        (Slice(b, 3, 3), [7, 12, 13]),
        (Slice(b, 7, 1), [15]),
    ):
        slots, table = cache.slots(part), cache.table(part.request)
        assert slots == wanted, f"tokens {part.start} to {part.stop}, page table {table}, pages of 4: slots {slots}"


def test_grow_allocates_all_pages_or_none(cache: PagedCache) -> None:
    a, b = request("a"), request("b")
    cache.attach(a)
    cache.attach(b)
    cache.grow(a, 4 * 4)
    cache.grow(b, 1)
    assert cache.can_grow(b, 2 * 4), "b has a page of 4, one more is free, and 8 tokens do not fit"
    assert not cache.can_grow(b, 2 * 4 + 1), "b has a page of 4, one more is free, and 9 tokens fit"
    refused(OutOfPagesError, "2 pages wanted, 1 free", cache.grow, b, 2 * 4 + 1)
    assert (len(cache.table(b)), cache.usage.free) == (1, 1), f"a grow that failed left {cache.table(b)}, {cache.usage}"
    cache.release(a)
    cache.grow(b, 2 * 4 + 1)
    check_counts(cache)


def test_a_request_without_a_page_table_is_refused(cache: PagedCache) -> None:
    a = request("a")
    for act, *given in (
        (cache.grow, a, 1),
        (cache.can_grow, a, 1),
        (cache.slots, Slice(a, 0, 1)),
        (cache.table, a),
        (cache.publish, a),
        (cache.release, a),
    ):
        refused(PageError, "request a has no page table", act, *given)
    cache.attach(a)
    refused(PageError, "request a has a page table already", cache.attach, a)
    for ask in (cache.grow, cache.can_grow):
        refused(ValueError, "request a cannot have -1 tokens", ask, a, -1)
    cache.grow(a, 5)
    refused(PageError, "request a has room for 8 tokens, not for 7 to 9", cache.slots, Slice(a, 7, 2))


def test_rows_are_reused_from_the_lowest(cache: PagedCache) -> None:
    a, b, c, d, e = map(request, "abcde")
    for first in (a, b, c):
        cache.attach(first)
    assert [cache.row(first) for first in (a, b, c)] == [0, 1, 2]
    cache.release(b)
    cache.release(a)
    for later in (d, e, a):
        cache.attach(later)
    rows = [cache.row(attached) for attached in (d, e, c, a)]
    assert rows == [0, 1, 2, 3], f"rows 0 and 1 were closed, then two requests and a third attached: {rows}"


def test_changes_are_what_the_device_has_not_seen(cache: PagedCache) -> None:
    """The first entry that is new, until the device has read the changes and cleared the notes."""
    a, b = request("a"), request("b")
    cache.attach(a)
    cache.grow(a, 5)
    cache.grow(a, 9)
    noted = [(row, first, list(table)) for row, first, table in cache.changes()]
    assert noted == [(0, 0, [0, 1, 2])], f"the device has seen no entry of row 0, but the changes are {noted}"
    cache.changed.clear()
    cache.grow(a, 12)
    assert cache.changed == {}, "no page was added, and a change is noted"
    cache.grow(a, 13)
    cache.grow(a, 17)
    cache.attach(b)
    assert cache.changed == {"a": 3, "b": 0}, f"entries 3 and 4 of a and all of b are new, noted: {cache.changed}"
    cache.release(a)
    assert cache.changed == {"b": 0}, "request a was released, and a change of its table is still noted"


def test_max_tokens_is_the_capacity_of_the_pool(cache: PagedCache) -> None:
    assert cache.max_tokens == 24
    a = request()
    cache.attach(a)
    cache.grow(a, 24)
    assert not cache.can_grow(a, 25)
    with pytest.raises(ValueError, match="page_size must be an integer from 1"):
        PagedCache(4, 0)


@pytest.mark.parametrize(
    ("breakage", "message"),
    [
        (lambda c: c.tables["a"].append(c.tables["b"][0]), "in two tables"),
        (lambda c: c.tables["a"].pop(), "page 1 has 0 references and a count of 1"),
        (lambda c: c.allocator.share(c.tables["a"]), "page 0 has 1 references and a count of 2"),
    ],
)
def test_check_finds_every_inconsistency(
    cache: PagedCache, breakage: Callable[[PagedCache], object], message: str
) -> None:
    for name in "ab":
        cache.attach(request(name))
        cache.grow(request(name), 6)
    check_counts(cache)
    breakage(cache)
    with pytest.raises(PageError, match=message):
        check_counts(cache)


class CacheAgainstSlotSets(RuleBasedStateMachine):
    """The model is a set of slots: no two live requests may have a slot in common."""

    @initialize(pages=st.integers(1, 10), page_size=st.sampled_from([1, 3, 4, 16]))
    def start(self, pages: int, page_size: int) -> None:
        self.cache = PagedCache(pages, page_size)
        self.total = pages * page_size
        self.capacity: dict[str, int] = {}  # request -> the number of tokens that it has slots for
        self.live: dict[str, Request] = {}
        self.made = 0

    def pages_of(self, tokens: int) -> int:
        return -(-tokens // self.cache.page_size)

    @rule()
    def attach(self) -> None:
        self.made += 1
        new = request(f"r{self.made}")
        assert self.cache.attach(new) == 0
        self.live[new.id], self.capacity[new.id] = new, 0

    @rule(data=st.data(), tokens=st.integers(0, 60))
    def grow(self, data: st.DataObject, tokens: int) -> None:
        if not self.live:
            return
        name = data.draw(st.sampled_from(sorted(self.live)))
        grown = self.live[name]
        free = self.total // self.cache.page_size - sum(map(self.pages_of, self.capacity.values()))
        fits = self.pages_of(tokens) - self.pages_of(self.capacity[name]) <= free
        assert self.cache.can_grow(grown, tokens) == fits, f"{name}, to {tokens} tokens, with {free} pages free"
        if not fits:
            refused(OutOfPagesError, "pages wanted", self.cache.grow, grown, tokens)
            return
        before = list(self.cache.table(grown))
        self.cache.grow(grown, tokens)
        self.cache.publish(grown)  # changes nothing without a prefix cache
        self.capacity[name] = max(self.capacity[name], tokens)
        after = list(self.cache.table(grown))
        assert after[: len(before)] == before, f"tokens moved: the table of {name} was {before}, and is {after}"

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        if self.live:
            name = data.draw(st.sampled_from(sorted(self.live)))
            self.cache.release(self.live.pop(name))
            del self.capacity[name]

    @invariant()
    def no_slot_has_two_owners(self) -> None:
        if not hasattr(self, "cache"):
            return
        check_counts(self.cache)
        taken: list[int] = []
        for name, owner in self.live.items():
            slots = self.cache.slots(Slice(owner, 0, self.capacity[name]))
            assert len(slots) == self.capacity[name], f"request {name} has slots {slots}"
            taken += slots
            assert len(self.cache.table(owner)) == self.pages_of(self.capacity[name])
        assert len(taken) == len(set(taken)), f"a slot belongs to two tokens: {sorted(taken)}"
        assert set(taken) <= set(range(self.total))
        usage = self.cache.usage
        assert usage.free + usage.referenced + usage.cached == usage.total
        assert usage.referenced == sum(map(self.pages_of, self.capacity.values()))


CacheAgainstSlotSets.TestCase.settings = settings(max_examples=80, stateful_step_count=40)
TestCacheAgainstSlotSets = CacheAgainstSlotSets.TestCase

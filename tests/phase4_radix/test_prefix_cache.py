import itertools
from collections.abc import Callable, Sequence

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from phase0_request import FinishReason, Request, SamplingParams, Slice
from phase1_kv_pool import KVCache, OutOfPagesError, PagedCache, PageError, Usage
from phase4_radix import radix_tree
from phase4_radix.prefix_cache import Counts, PrefixCache

SIZE = 4


@pytest.fixture
def cache() -> PrefixCache:
    return PrefixCache(num_pages=12, page_size=SIZE)


def come(cache: KVCache, name: str, tokens: Sequence[int], salt: str = "") -> Request:
    """A request that is admitted and attached, as a scheduler does it."""
    request = Request(name, tuple(tokens), cache_salt=salt)
    resume(cache, request)
    return request


def resume(cache: KVCache, request: Request) -> None:
    request.admit(0.0)
    found = cache.attach(request)
    if found:
        request.advance(0, found)


def compute(cache: KVCache, request: Request, length: int | None = None, publish: bool = True) -> list[int]:
    """One step of one request. Returns the slots that it wrote."""
    piece = Slice(request, request.computed, request.total - request.computed if length is None else length)
    cache.grow(request, piece.stop)
    slots = cache.slots(piece)
    request.advance(piece.start, piece.length)
    if publish:
        cache.publish(request)
    return slots


def leave(cache: KVCache, request: Request) -> None:
    request.finish(FinishReason.LENGTH, 0.0)
    cache.release(request)


@pytest.mark.proof
def test_a_prefix_seen_before_is_there_already(cache: PrefixCache) -> None:
    a = come(cache, "a", range(10))
    assert compute(cache, a) == list(range(10))
    leave(cache, a)
    assert cache.usage == Usage(total=12, free=10, referenced=0, cached=2)
    b = come(cache, "b", [*range(8), 77, 78])
    assert (b.computed, list(cache.table(b))) == (8, [0, 1])
    assert compute(cache, b) == [2 * SIZE, 2 * SIZE + 1]
    assert cache.usage == Usage(total=12, free=9, referenced=3, cached=0)
    cache.check()


@pytest.mark.proof
def test_a_prompt_is_shared_while_its_first_reader_still_runs(cache: PrefixCache) -> None:
    a = come(cache, "a", range(10))
    compute(cache, a)
    a.append(99, 0.0)
    b = come(cache, "b", range(10))
    assert b.computed == 8
    assert list(cache.table(b)) == list(cache.table(a))[:2]
    assert cache.allocator.count(cache.table(a)[0]) == 3  # two tables and the tree
    cache.check()


def test_answers_are_shared_too(cache: PrefixCache) -> None:
    """The next turn of a chat begins with the last one's question and answer."""
    a = come(cache, "a", range(6))
    for token in range(6, 10):
        compute(cache, a)
        a.append(token, 0.0)
    leave(cache, a)
    assert come(cache, "b", [*range(10), 50, 51]).computed == 8


def test_nothing_is_shared_before_it_is_computed_and_its_page_full(cache: PrefixCache) -> None:
    a = come(cache, "a", range(10))
    probe = Request("probe", tuple(range(10)))
    cache.grow(a, 10)
    assert cache.cached_tokens(probe) == 0
    for length, there in ((3, 0), (1, 4), (3, 4), (2, 8), (1, 8)):
        compute(cache, a, length, publish=False)
        before = cache.cached_tokens(probe)
        cache.publish(a)
        assert before <= cache.cached_tokens(probe) == there
    cache.check()


@pytest.mark.parametrize(("prompt", "found"), [(1, 0), (4, 0), (5, 4), (8, 4), (9, 8), (10, 8)])
def test_a_wholly_cached_prompt_has_something_left_to_compute(cache: PrefixCache, prompt: int, found: int) -> None:
    compute(cache, come(cache, "a", range(12)))
    b = come(cache, "b", range(prompt))
    assert b.computed == found < b.total
    assert cache.cached_tokens(b) == cache.found(b) == found
    compute(cache, b)
    b.append(1, 0.0)
    assert b.output_tokens == [1]
    cache.check()


def test_two_alike_at_once_end_up_on_the_same_pages(cache: PrefixCache) -> None:
    """Both compute, since neither could know. Whoever is second takes over the first one's pages and frees its own."""
    a, b = come(cache, "a", range(10)), come(cache, "b", range(10))
    slots = compute(cache, a, publish=False), compute(cache, b, publish=False)
    assert not set(slots[0]) & set(slots[1])
    assert cache.usage.free == 12 - 6
    cache.publish(a)
    cache.publish(b)
    assert list(cache.table(b))[:2] == list(cache.table(a))[:2] == [0, 1]
    assert cache.table(b)[2] not in cache.table(a)
    assert cache.usage.free == 12 - 4
    assert cache.counts.duplicates == 2
    cache.check()
    leave(cache, a)
    cache.check()
    cache.grow(b, (12 - 3 + 3) * SIZE)  # every free page, and what is evictable: none of it is b's
    assert len(set(cache.table(b))) == 12
    leave(cache, b)
    cache.check()


@pytest.mark.parametrize("lag", [0, 1, 5])
@pytest.mark.parametrize("people", [2, 3])
def test_the_same_answer_to_several_is_one_run(people: int, lag: int) -> None:
    """All compute all of it, each some steps after the one before: no trace of the steps is left in the tree."""
    cache = PrefixCache(num_pages=1000, page_size=SIZE)
    everyone = [come(cache, f"r{number}", range(10)) for number in range(people)]
    for step in range(200 + lag * people):
        for number, request in enumerate(everyone):
            if number * lag <= step < number * lag + 200:
                compute(cache, request)
                request.append(request.total, 0.0)
        assert len(cache.tree) <= people
    for request in everyone:
        leave(cache, request)
    assert (len(cache.tree), cache.tree.num_pages) == (1, 209 // SIZE)
    cache.check()


def test_the_same_prompt_in_chunks_is_one_run(cache: PrefixCache) -> None:
    a, b = come(cache, "a", range(22)), come(cache, "b", range(22))
    for length in (8, 8, 6):
        for request in (a, b):
            compute(cache, request, length, publish=False)
        for request in (a, b):
            cache.publish(request)
    assert len(cache.tree) == 1
    cache.check()


def test_who_never_got_room_leaves_no_trace(cache: PrefixCache) -> None:
    """No node, and no use: who was only tried makes nothing younger."""
    for name, first in (("a", 0), ("b", 100)):
        request = come(cache, name, range(first, first + 20))
        compute(cache, request)
        leave(cache, request)
    before = list(cache.tree.branches())
    for length in range(1, 21):
        tried = Request("tried", tuple(range(length)))
        cache.attach(tried)
        cache.release(tried)
        cache.check()
        assert list(cache.tree.branches()) == before
    cache.grow(come(cache, "c", [200]), 7 * SIZE)
    assert cache.cached_tokens(Request("probe", tuple(range(20)))) == 0  # a's went first, as it had come first
    assert cache.cached_tokens(Request("probe", tuple(range(100, 120)))) == 16


@pytest.mark.parametrize(("scored", "found"), [(0, 0), (7, 4), (8, 8), (11, 8)])
def test_a_prompt_that_is_to_be_scored_finds_what_is_scored(cache: PrefixCache, scored: int, found: int) -> None:
    """It came before, had so many scores, and comes again. The others come out of computing its tokens."""
    compute(cache, come(cache, "a", range(12)))
    b = Request("b", tuple(range(12)), SamplingParams(prompt_logprobs=0))
    b.prompt_logprobs.extend([{}] * scored)
    assert cache.cached_tokens(b) == found
    assert cache.attach(b) == found


def test_the_table_names_the_canonical_pages_before_its_own_are_freed(cache: PrefixCache) -> None:
    a, b = come(cache, "a", range(10)), come(cache, "b", range(10))
    compute(cache, a)
    compute(cache, b, publish=False)
    own, original = list(cache.table(b)), cache.allocator.release
    named: list[list[int]] = []

    def release(pages: Sequence[int]) -> int:
        named.append([page for page in pages if page in cache.table(b)])
        assert all(cache.allocator.count(page) for page in cache.table(b))
        return original(pages)

    cache.allocator.release = release  # type: ignore[method-assign]
    cache.publish(b)
    assert named == [[]]
    assert [cache.allocator.count(page) for page in own] == [0, 0, 1]


def test_a_duplicate_of_a_part_keeps_the_rest(cache: PrefixCache) -> None:
    a, b = come(cache, "a", range(6)), come(cache, "b", [*range(4), *range(20, 26)])
    compute(cache, b, publish=False)
    own = list(cache.table(b))
    compute(cache, a)
    cache.publish(b)
    assert list(cache.table(b)) == [cache.table(a)[0], *own[1:]]
    cache.check()


def test_what_a_request_reads_is_never_evicted(cache: PrefixCache) -> None:
    a = come(cache, "a", range(16))
    compute(cache, a)
    leave(cache, a)
    b = come(cache, "b", [*range(8), 50])
    pages = list(cache.table(b))
    c = come(cache, "c", range(100, 104))
    assert cache.can_grow(c, 10 * SIZE)
    assert not cache.can_grow(c, 10 * SIZE + 1)
    with pytest.raises(OutOfPagesError, match="11 pages wanted, 10 free"):
        cache.grow(c, 10 * SIZE + 1)
    assert cache.counts.evictions == 0  # what cannot succeed forgets nothing
    cache.grow(c, 10 * SIZE)
    assert cache.counts.evictions == 2
    assert list(cache.table(b)) == pages
    assert not set(pages) & set(cache.table(c))
    assert cache.cached_tokens(Request("probe", tuple(range(16)))) == 8
    cache.check()


def test_growing_forgets_no_more_than_it_must(cache: PrefixCache) -> None:
    compute(cache, a := come(cache, "a", range(40)))
    leave(cache, a)
    b = come(cache, "b", range(50, 60))
    for tokens, evictions in ((8, 0), (9, 1), (12, 1), (17, 3)):
        cache.grow(b, tokens)
        assert cache.counts.evictions == evictions
    assert cache.usage == Usage(total=12, free=0, referenced=5, cached=7)


def test_a_preempted_request_finds_its_pages_again(cache: PrefixCache) -> None:
    a = come(cache, "a", range(6))
    for token in range(100, 105):
        compute(cache, a)
        a.append(token, 0.0)
    pages = list(cache.table(a))
    a.preempt()
    cache.release(a)
    assert cache.usage.referenced == 0
    resume(cache, a)
    assert (a.computed, list(cache.table(a))) == (8, pages[:2])
    compute(cache, a)
    cache.check()


def test_tenants_share_nothing(cache: PrefixCache) -> None:
    compute(cache, come(cache, "a", range(10), salt="one"))
    assert come(cache, "b", range(10), salt="two").computed == 0
    assert come(cache, "c", range(10)).computed == 0
    assert come(cache, "d", range(10), salt="one").computed == 8


def test_a_request_reads_its_own_prefix_not_the_first_ones(cache: PrefixCache) -> None:
    for name, first in (("a", 0), ("b", 20), ("c", 40)):
        compute(cache, come(cache, name, range(first, first + 9)))
    tables = [tuple(cache.tree.match(range(first, first + 9)).pages) for first in (0, 20, 40)]
    assert len({page for table in tables for page in table}) == 6


def test_published_pages_are_not_written(cache: PrefixCache) -> None:
    a = come(cache, "a", range(10))
    compute(cache, a)
    with pytest.raises(PageError, match="request a cannot write token 7: page 1 is published"):
        cache.slots(Slice(a, 7, 2))
    assert cache.slots(Slice(a, 8, 2)) == [8, 9]
    b = Request("b", tuple(range(10)))
    cache.attach(b)  # and then nobody advances it
    with pytest.raises(PageError, match="request b cannot write token 0: page 0 is published"):
        cache.slots(Slice(b, 0, 10))


def test_a_page_is_added_when_an_answer_outgrows_the_last(cache: PrefixCache) -> None:
    a = come(cache, "a", range(3))
    lengths = []
    for token in range(10):
        compute(cache, a)
        a.append(token, 0.0)
        lengths.append(len(cache.table(a)))
    assert lengths == [1, 1, 2, 2, 2, 2, 3, 3, 3, 3]


def test_what_outgrows_the_pool_is_told_so(cache: PrefixCache) -> None:
    assert cache.max_tokens == 48
    a = come(cache, "a", range(60))
    assert cache.can_grow(a, 48)
    assert not cache.can_grow(a, 49)
    with pytest.raises(OutOfPagesError, match="13 pages wanted, 12 free"):
        cache.grow(a, 49)
    cache.grow(a, 48)
    cache.check()


def test_leaving_at_any_moment_leaks_no_page(cache: PrefixCache) -> None:
    for computed in range(11):
        request = come(cache, f"r{computed}", range(computed * 100, computed * 100 + 10))
        if computed:
            compute(cache, request, computed)
        cache.grow(request, 10)
        request.abort(0.0)
        cache.release(request)
        cache.check()
        assert cache.usage.referenced == 0
    cache.reset()
    assert cache.usage.free == 12


def test_a_request_without_a_table_has_nothing(cache: PrefixCache) -> None:
    a = Request("a", (1, 2))
    for act in (
        lambda: cache.grow(a, 1),
        lambda: cache.can_grow(a, 1),
        lambda: cache.slots(Slice(a, 0, 1)),
        lambda: cache.table(a),
        lambda: cache.publish(a),
        lambda: cache.found(a),
        lambda: cache.release(a),
    ):
        with pytest.raises(PageError, match="request a has no page table"):
            act()
    cache.attach(a)
    with pytest.raises(PageError, match="request a has a page table already"):
        cache.attach(a)
    cache.release(a)
    assert cache.usage.free == 12


def test_computed_tokens_without_pages_are_a_fault(cache: PrefixCache) -> None:
    a = come(cache, "a", range(10))
    cache.grow(a, 4)
    a.advance(0, 8)
    with pytest.raises(PageError, match="request a has computed 8 tokens, with 1 pages"):
        cache.publish(a)


def test_the_counts_say_what_came_of_it(cache: PrefixCache) -> None:
    assert cache.counts.hit_rate == 0.0
    a = come(cache, "a", range(10))
    compute(cache, a)
    b = come(cache, "b", range(20))
    compute(cache, b, 6)
    compute(cache, b)
    assert (cache.found(a), cache.found(b)) == (0, 8)
    counts = cache.counts
    assert (counts.queries, counts.query_tokens, counts.hit_tokens) == (2, 30, 8)
    assert counts.hit_rate == 8 / 30
    tried = Request("tried", tuple(range(10)))
    for _ in range(3):  # a scheduler tries, has no room, and puts it back
        cache.attach(tried)
        cache.release(tried)
    assert counts.queries == 2


def test_a_reset_frees_what_nobody_uses(cache: PrefixCache) -> None:
    compute(cache, a := come(cache, "a", range(10)))
    compute(cache, b := come(cache, "b", [*range(4), *range(50, 60)]))
    leave(cache, a)
    assert cache.usage == Usage(total=12, free=7, referenced=4, cached=1)
    assert cache.reset() == 1
    assert cache.usage == Usage(total=12, free=8, referenced=4, cached=0)
    assert cache.counts.evictions == 0
    cache.check()
    leave(cache, b)
    assert cache.reset() == 3
    assert cache.usage == Usage(total=12, free=12, referenced=0, cached=0)


def test_a_loop_of_prompts_reaches_the_hit_rate_of_the_seed() -> None:
    """Three prompts, two with a common beginning, asked again and again: 60 % is promised."""
    cache = PrefixCache(num_pages=64, page_size=1)
    for turn in range(4):
        for number, prompt in enumerate(([1, 2, 3, 4, 5], [1, 2, 3, 6, 7], [10, 20, 30])):
            request = come(cache, f"{turn}.{number}", prompt)
            compute(cache, request)
            leave(cache, request)
    assert cache.counts.hit_tokens == 3 + 3 * (4 + 4 + 2)
    assert cache.counts.hit_rate == 33 / 52 > 0.6


def test_sixteen_requests_on_one_prompt_compute_it_once() -> None:
    """512 of 544 tokens in common: at least 85 % less to compute."""
    cache, computed = PrefixCache(num_pages=256), 0
    for number in range(16):
        request = come(cache, f"r{number}", [*range(512), *range(1000 * number + 1000, 1000 * number + 1032)])
        computed += request.total - request.computed
        compute(cache, request)
    assert computed == 512 + 16 * 32
    assert computed < 0.15 * 16 * 544


def test_publishing_costs_the_same_at_the_end_of_a_long_answer_as_at_its_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only new tokens are looked at: nothing is done again from the root."""
    cache = PrefixCache(num_pages=300, page_size=1)
    request = come(cache, "a", range(200))
    compute(cache, request, 50)
    packed: list[int] = []
    original = radix_tree.in_pages

    def in_pages(tokens: Sequence[int], page_size: int, salt: str = "") -> list[bytes]:
        packed.append(len(tokens))
        return original(tokens, page_size, salt)

    monkeypatch.setattr(radix_tree, "in_pages", in_pages)
    for _ in range(150):
        compute(cache, request, 1)
    assert packed == [1] * 150
    assert len(cache.tree) == 1


@pytest.mark.parametrize(
    ("breakage", "message"),
    [
        (lambda c: c.allocator.share([0]), "page 0 is named 3 times and has 4 users"),
        (lambda c: c._tables["b"].reverse(), "has locked other pages|named twice"),
        (lambda c: c.tree.lock(c._held["a"].node), "requests hold it"),
        (lambda c: c.tree.unlock(c._held["b"].node), "requests hold it"),
        (lambda c: setattr(c._held["b"], "published", 1), "named twice"),
    ],
)
def test_check_finds_what_is_wrong(cache: PrefixCache, breakage: Callable[[PrefixCache], object], message: str) -> None:
    compute(cache, come(cache, "a", range(14)))
    compute(cache, come(cache, "b", [*range(8), 60, 61, 62, 63, 64]))
    cache.check()
    breakage(cache)
    with pytest.raises(PageError, match=message):
        cache.check()


def test_a_page_in_two_tables_that_nobody_published_is_found(cache: PrefixCache) -> None:
    a, b = come(cache, "a", range(3)), come(cache, "b", range(3))
    cache.grow(a, 3)
    cache._tables["b"] += cache.table(a)
    cache.allocator.share(cache.table(b))
    with pytest.raises(PageError, match="not published is named twice"):
        cache.check()


@pytest.mark.parametrize("kind", [PagedCache, PrefixCache])
def test_a_scheduler_cannot_tell_which_it_has(kind: type[PagedCache]) -> None:
    """Requests with nothing in common get the same slots from both."""
    cache: KVCache = kind(8, SIZE)
    first, second = come(cache, "a", range(6)), come(cache, "b", range(10, 15))
    slots = [compute(cache, first, 3), compute(cache, second), compute(cache, first)]
    assert slots == [[0, 1, 2], [4, 5, 6, 7, 8], [3, 12, 13]]
    cache.check()


Content = tuple[str, tuple[int, ...]]  # what lies in a slot: whose keys and values, and of which prefix


class AgainstTheContentOfSlots(RuleBasedStateMachine):
    """The pool is pretended: a slot remembers for which salt and prefix it was written. Whatever requests do, each
    finds in every slot of its table what it would have computed there itself."""

    rules_run = 0
    seen = Counts()  # over all runs
    prompts = st.lists(st.integers(0, 1), min_size=1, max_size=9)
    pick = st.integers(0, 99)

    @initialize(pages=st.integers(3, 10), page_size=st.integers(1, 3))
    def start(self, pages: int, page_size: int) -> None:
        self.size, self.all_pages = page_size, range(pages)
        self.cache = PrefixCache(pages, page_size)
        self.slots: dict[int, Content] = {}
        self.running: list[Request] = []
        self.preempted: list[Request] = []
        self.made = self.came = 0

    def in_tree(self) -> set[int]:
        return {page for branch in self.cache.tree.branches() for page in branch.pages}

    def in_tables(self) -> set[int]:
        return {page for request in self.running for page in self.cache.table(request)}

    def published(self) -> dict[Content, int]:
        """Every prefix that the tree holds, by what was written where it ends."""
        pages = self.in_tree()
        ends = {self.slots[(page + 1) * self.size - 1]: page for page in pages}
        assert len(ends) == len(pages)  # no prefix twice
        return ends

    def prefixes(self, request: Request, stop: int) -> list[Content]:
        tokens = tuple(request.tokens(0, request.total))
        return [(request.cache_salt, tokens[:end]) for end in range(self.size, stop + 1, self.size)]

    def attach(self, request: Request) -> None:
        ends = self.published()
        known = [ends[p] for p in self.prefixes(request, request.total - 1) if p in ends]
        assert self.cache.cached_tokens(request) == len(known) * self.size
        resume(self.cache, request)
        assert list(self.cache.table(request)) == known
        assert request.computed == len(known) * self.size == self.cache.found(request)
        self.running.append(request)
        self.came += 1

    @rule(prompt=prompts, salt=st.sampled_from(["", "", "", "s"]))
    def submit(self, prompt: list[int], salt: str) -> None:
        self.made += 1
        self.attach(Request(f"r{self.made}", tuple(prompt), cache_salt=salt))

    @precondition(lambda self: self.running)
    @rule(which=pick)
    def submit_again(self, which: int) -> None:
        """What another is being asked, and some of what it has answered."""
        model = self.running[which % len(self.running)]
        self.submit(model.tokens(0, model.total - which % model.total), model.cache_salt)

    @precondition(lambda self: self.preempted)
    @rule(which=pick)
    def resubmit(self, which: int) -> None:
        self.attach(self.preempted.pop(which % len(self.preempted)))

    @precondition(lambda self: self.running)
    @rule(lengths=st.lists(st.integers(0, 6), min_size=1, max_size=5), answer=st.integers(0, 1))
    def one_step(self, lengths: list[int], answer: int) -> None:
        self.step(lengths, answer)

    def step(self, lengths: list[int], answer: int) -> None:
        """A step of an engine: everyone computes something, then everyone publishes. Who came last gives way."""
        batch = list(zip(self.running, itertools.cycle(lengths), strict=False))
        for request, length in batch:
            while request in self.running and not self.compute(request, length):
                self.drop(self.running[-1], preempt=True)
        for request, length in batch:
            if length and request in self.running:
                self.publish(request)
                if request.computed == request.total:
                    request.append(answer, 0.0)

    @precondition(lambda self: self.running)
    @rule(steps=st.integers(2, 6), answer=st.integers(0, 1))
    def steps(self, steps: int, answer: int) -> None:
        for _ in range(steps):
            self.step([2], answer)

    @precondition(lambda self: self.running)
    @rule(which=pick, length=st.integers(1, 6))
    def compute_one(self, which: int, length: int) -> None:
        self.compute(self.running[which % len(self.running)], length)

    @precondition(lambda self: self.running)
    @rule(which=pick)
    def publish_one(self, which: int) -> None:
        self.publish(self.running[which % len(self.running)])

    def compute(self, request: Request, length: int) -> bool:
        """Growing succeeds exactly if the free pages, and those that only the tree names, are enough."""
        piece = Slice(request, request.computed, min(length, request.total - request.computed))
        missing = max(-(-piece.stop // self.size) - len(self.cache.table(request)), 0)
        free = sum(self.cache.allocator.count(page) == 0 for page in self.all_pages)
        room = free + len(self.in_tree() - self.in_tables())
        assert self.cache.can_grow(request, piece.stop) == (missing <= room)
        before, evictions = self.cache.usage, self.cache.counts.evictions
        if missing > room:
            with pytest.raises(OutOfPagesError):
                self.cache.grow(request, piece.stop)
            assert self.cache.usage == before
            return False
        self.cache.grow(request, piece.stop)
        assert self.cache.counts.evictions - evictions == max(missing - free, 0)
        if not piece.length:
            return True
        others = {page for one in self.running if one is not request for page in self.cache.table(one)}
        tokens = tuple(request.tokens(0, piece.stop))
        for position, slot in zip(range(piece.start, piece.stop), self.cache.slots(piece), strict=True):
            assert slot // self.size not in self.in_tree() | others
            self.slots[slot] = request.cache_salt, tokens[: position + 1]
        request.advance(piece.start, piece.length)
        return True

    def publish(self, request: Request) -> None:
        """The tree holds then what it held and every full page that the request has computed, and no prefix twice. The
        table names the tree's pages, and behind them what it named before."""
        before, table = self.published(), list(self.cache.table(request))
        full = self.prefixes(request, request.computed)
        self.cache.publish(request)
        after = self.published()
        assert after == dict(zip(full, table, strict=False)) | before
        assert list(self.cache.table(request)) == [after[prefix] for prefix in full] + table[len(full) :]

    @precondition(lambda self: self.running)
    @rule(which=pick, preempt=st.booleans())
    def leave(self, which: int, preempt: bool) -> None:
        self.drop(self.running[which % len(self.running)], preempt)

    def drop(self, request: Request, preempt: bool) -> None:
        self.running.remove(request)
        if preempt:
            request.preempt()
            self.preempted.append(request)
        else:
            request.abort(0.0)
        before = self.in_tree()
        self.cache.release(request)
        assert self.in_tree() == before  # release keeps pages cached

    @precondition(lambda self: len(self.running) > 1 and self.cache.usage.cached)
    @rule()
    def reset(self) -> None:
        unused = self.in_tree() - self.in_tables()
        assert self.cache.reset() == len(unused)
        assert self.in_tree() <= self.in_tables()

    def teardown(self) -> None:
        if hasattr(self, "cache"):
            for name in Counts.__slots__:
                setattr(self.seen, name, getattr(self.seen, name) + getattr(self.cache.counts, name))

    @invariant()
    def agrees(self) -> None:
        AgainstTheContentOfSlots.rules_run += 1
        if not hasattr(self, "cache"):
            return
        self.cache.check()
        assert len(self.cache.tree) <= 2 * self.came  # where one parts from the others, and where it ends
        cached, referenced = self.in_tree() - self.in_tables(), self.in_tables()
        free = {page for page in self.all_pages if self.cache.allocator.count(page) == 0}
        assert not free & (self.in_tree() | referenced)
        assert len(free) + len(cached) + len(referenced) == len(self.all_pages)
        assert self.cache.usage == Usage(len(self.all_pages), len(free), len(referenced), len(cached))
        for page in self.all_pages:
            tables = sum(page in self.cache.table(request) for request in self.running)
            assert self.cache.allocator.count(page) == tables + (page in self.in_tree())
        for page in free:  # whoever reads it from now on reads nothing
            for slot in range(page * self.size, (page + 1) * self.size):
                self.slots.pop(slot, None)
        for request in self.running:
            table, tokens = self.cache.table(request), tuple(request.tokens(0, request.total))
            for position in range(request.computed):
                slot = table[position // self.size] * self.size + position % self.size
                assert self.slots[slot] == (request.cache_salt, tokens[: position + 1])


def test_at_least_ten_thousand_rules_hold() -> None:
    """The promise is counted, not assumed: every rule is followed by every invariant. And what the cache is for came to
    pass: tokens found, pages computed twice, pages evicted."""
    AgainstTheContentOfSlots.rules_run, AgainstTheContentOfSlots.seen = 0, Counts()
    run_state_machine_as_test(
        AgainstTheContentOfSlots, settings=settings(max_examples=300, stateful_step_count=60, derandomize=True)
    )
    assert AgainstTheContentOfSlots.rules_run >= 10_000
    seen = AgainstTheContentOfSlots.seen
    assert min(seen.hit_tokens, seen.duplicates, seen.evictions) >= 500

"""A prefix computed once: what a request finds, what it publishes, and whose pages it reads."""

from collections.abc import Sequence

import pytest

from phase0_request import Request, SamplingParams, Slice
from phase1_kv_pool import PageError, Usage
from phase4_radix import radix_tree
from phase4_radix.prefix_cache import PrefixCache
from tests.phase4_radix.lives import SIZE, come, compute, leave, resume

# What is found.


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


@pytest.mark.parametrize(("scored", "found"), [(0, 0), (7, 4), (8, 8), (11, 8)])
def test_a_prompt_that_is_to_be_scored_finds_what_is_scored(cache: PrefixCache, scored: int, found: int) -> None:
    """It came before, had so many scores, and comes again. The others come out of computing its tokens."""
    compute(cache, come(cache, "a", range(12)))
    b = Request("b", tuple(range(12)), SamplingParams(prompt_logprobs=0))
    b.prompt_logprobs.extend([{}] * scored)
    assert cache.cached_tokens(b) == found
    assert cache.attach(b) == found


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


# What is published.


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

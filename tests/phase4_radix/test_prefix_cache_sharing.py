"""A shared prefix is computed once: hits, publishing, and the pages that a request reads."""

from collections.abc import Sequence

import pytest

from phase0_request import Request, SamplingParams, Slice, TokenLogprobs
from phase1_kv_pool import PageError, PageUsage
from phase2_prefill_decode.extras.outcome import add_prompt_logprobs
from phase4_radix import radix_tree
from phase4_radix.extras.invariants import check_cache
from phase4_radix.prefix_cache import PrefixCache
from tests.phase4_radix.steps import SIZE, admit, compute, finish


@pytest.mark.proof
def test_a_prefix_computed_before_is_a_hit(cache: PrefixCache) -> None:
    a = admit(cache, "a", range(10))
    assert compute(cache, a) == list(range(10))
    finish(cache, a)
    usage = cache.usage
    assert usage == PageUsage(total=12, free=10, referenced=0, cached=2), f"two full pages stay cached: {usage}"
    b = admit(cache, "b", [*range(8), 77, 78])
    found = b.computed, list(cache.table(b))
    assert found == (8, [0, 1]), f"(cached tokens, page table) of a request that shares two pages: {found}"
    slots = compute(cache, b)
    assert slots == [2 * SIZE, 2 * SIZE + 1], f"it writes its two tokens into a page of its own: slots {slots}"
    usage = cache.usage
    assert usage == PageUsage(total=12, free=9, referenced=3, cached=0), f"two shared pages and its own: {usage}"
    check_cache(cache)


@pytest.mark.parametrize(("prompt", "found"), [(1, 0), (4, 0), (5, 4), (8, 4), (9, 8), (10, 8)])
def test_a_wholly_cached_prompt_leaves_one_token_to_compute(cache: PrefixCache, prompt: int, found: int) -> None:
    compute(cache, admit(cache, "a", range(12)))
    b = admit(cache, "b", range(prompt))
    assert b.computed == found < b.total, f"{b.computed} of {prompt} tokens are taken from the cache"
    assert cache.cached_tokens(b) == found
    compute(cache, b)
    b.append(1, 0.0)
    assert b.output_tokens == [1]
    check_cache(cache)


@pytest.mark.parametrize(("scored", "found"), [(0, 0), (7, 4), (8, 8), (11, 8)])
def test_prompt_logprobs_limit_the_hit_to_scored_tokens(cache: PrefixCache, scored: int, found: int) -> None:
    """A preempted request has some of its scores; the others can only come from computing its tokens."""
    compute(cache, admit(cache, "a", range(12)))
    b = Request("b", tuple(range(12)), SamplingParams(prompt_logprobs=0))
    add_prompt_logprobs(b, 0, [TokenLogprobs(-1.0, ())] * scored)
    tokens = cache.cached_tokens(b)
    assert tokens == found, f"{scored} prompt tokens have logprobs, and {tokens} are taken from the cache"
    assert cache.attach(b) == found


def test_different_salts_share_nothing(cache: PrefixCache) -> None:
    compute(cache, admit(cache, "a", range(10), salt="one"))
    for name, salt, wanted in (("b", "two", 0), ("c", "", 0), ("d", "one", 8)):
        found = admit(cache, name, range(10), salt=salt).computed
        assert found == wanted, f"8 tokens are cached under salt 'one'; with salt {salt!r} {found} are found"


def test_only_full_and_computed_pages_are_shared(cache: PrefixCache) -> None:
    a = admit(cache, "a", range(10))
    probe = Request("probe", tuple(range(10)))
    cache.grow(a, 10)
    assert cache.cached_tokens(probe) == 0
    for length, there in ((3, 0), (1, 4), (3, 4), (2, 8), (1, 8)):
        compute(cache, a, length, publish=False)
        before = cache.cached_tokens(probe)
        cache.publish(a)
        found = cache.cached_tokens(probe)
        assert before <= found == there, f"with {a.computed} tokens computed, {found} are cached"
    check_cache(cache)


@pytest.mark.parametrize("lag", [0, 1, 5])
@pytest.mark.parametrize("clients", [2, 3])
def test_requests_that_decode_the_same_answer_leave_one_node(clients: int, lag: int) -> None:
    """All of them compute it, each some steps after the one before, and the tree shows no trace of the steps."""
    cache = PrefixCache(num_pages=1000, page_size=SIZE)
    requests = [admit(cache, f"r{number}", range(10)) for number in range(clients)]
    for step in range(200 + lag * clients):
        for number, request in enumerate(requests):
            if number * lag <= step < number * lag + 200:
                compute(cache, request)
                request.append(request.total, 0.0)
        assert len(cache.tree) <= clients, f"{clients} requests decode one answer: {len(cache.tree)} nodes, step {step}"
    for request in requests:
        finish(cache, request)
    left = len(cache.tree), cache.tree.num_pages
    assert left == (1, 209 // SIZE), f"(nodes, pages) after {clients} requests with one answer of 209 tokens: {left}"
    check_cache(cache)


def test_switched_pages_are_new_to_the_device(cache: PrefixCache) -> None:
    """The first of them, or an earlier entry that the device has not read."""
    a, b = admit(cache, "a", range(22)), admit(cache, "b", range(22))

    def both_compute(length: int) -> None:
        compute(cache, a, length)
        compute(cache, b, length, publish=False)

    both_compute(4)
    cache.changed.clear()
    cache.publish(b)
    assert cache.changed == {"b": 0}, f"page 0 of b's table was switched, noted: {cache.changed}"
    both_compute(4)
    cache.publish(b)
    assert cache.changed["b"] == 0, f"entry 0 was not read yet, then page 1 was switched, noted: {cache.changed}"
    both_compute(4)
    cache.changed.clear()
    cache.grow(b, 14)
    cache.publish(b)
    assert cache.changed == {"b": 2}, f"page 3 was added, then page 2 switched, noted: {cache.changed}"
    both_compute(4)
    cache.changed.clear()
    cache.publish(a)
    assert cache.changed == {}, f"no page of a's table was switched, noted: {cache.changed}"


def test_shared_pages_are_new_to_the_device(cache: PrefixCache) -> None:
    compute(cache, admit(cache, "a", range(10)))
    cache.changed.clear()
    cache.attach(Request("b", tuple(range(10))))
    assert cache.changed == {"b": 0}, f"b's table begins with two shared pages, noted: {cache.changed}"


def test_published_pages_are_read_only(cache: PrefixCache) -> None:
    a = admit(cache, "a", range(10))
    compute(cache, a)
    with pytest.raises(PageError, match="request a cannot write token 7: page 1 is published"):
        cache.slots(Slice(a, 7, 2))
    assert cache.slots(Slice(a, 8, 2)) == [8, 9]
    b = Request("b", tuple(range(10)))
    cache.attach(b)  # without advancing it over the cached tokens
    with pytest.raises(PageError, match="request b cannot write token 0: page 0 is published"):
        cache.slots(Slice(b, 0, 10))
    c = admit(cache, "c", range(20, 30))  # its first page is page 3 of the pool
    compute(cache, c)
    with pytest.raises(PageError, match="request c cannot write token 0: page 3 is published"):
        cache.slots(Slice(c, 0, 1))


def test_publishing_looks_only_at_new_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = PrefixCache(num_pages=300, page_size=1)
    request = admit(cache, "a", range(200))
    compute(cache, request, 50)
    packed: list[int] = []
    asked: list[int] = []
    original, tokens_of = radix_tree.page_keys, Request.tokens

    def page_keys(tokens: Sequence[int], page_size: int, salt: str = "") -> list[bytes]:
        packed.append(len(tokens))
        return original(tokens, page_size, salt)

    def tokens(self: Request, start: int, stop: int) -> list[int]:
        asked.append(stop - start)
        return tokens_of(self, start, stop)

    monkeypatch.setattr(radix_tree, "page_keys", page_keys)
    monkeypatch.setattr(Request, "tokens", tokens)
    for _ in range(150):
        compute(cache, request, 1)
    assert packed == [1] * 150, "publishing a page packs more than its tokens"
    assert max(asked) == 1, f"publishing a page of one token asks the request for {max(asked)} tokens"
    assert len(cache.tree) == 1

"""Fair queueing: tenants share tokens, places and pages, however many requests each of them sends."""

from collections import Counter

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from phase0_request import FinishReason
from phase0_request.queue import SequenceState
from phase1_kv_pool import PagedCache
from phase3_chunked_prefill.budget import TokenBudget
from phase4_radix.prefix_cache import PrefixCache
from phase5_continuous.extras.fairness import FairQueues, FairShare
from phase5_continuous.policies import ByPriority, LongestPrefixFirst
from phase5_continuous.scheduler import Scheduler
from tests.phase5_continuous.support import EOS, Engine, preempted_of, request, share_of, waiting_of

PLACES, PROMPT, ANSWER = 4, 12, 16  # running requests, and the most tokens of a prompt and an answer


def engine(pages: int = 400, places: int = PLACES, ahead: int = 0, cache: type[PagedCache] = PagedCache) -> Engine:
    budget = TokenBudget(64, 64)
    turns = FairQueues
    return Engine(Scheduler(cache(pages, 4), EOS, budget, turns=turns, max_running=places, watermark=0, ahead=ahead))


def flood(one: Engine, tenant: str, count: int, prompt: int = 8, answer: int = 40) -> None:
    names = (f"{tenant}{len(one.requests)}-{n}" for n in range(count))
    one.submit(*(request(name, prompt, answer, arrival=one.now, tenant=tenant) for name in names))


def places(one: Engine) -> Counter[str]:
    return Counter(sequence.request.tenant for sequence in one.scheduler.running_set.running)


def tokens(one: Engine) -> Counter[str]:
    """The tokens of prompts and answers that were computed for each tenant: no step computes the last of an answer."""
    counted = Counter[str]()
    for batch in one.batches:
        for piece in batch:
            counted[piece.request.tenant] += piece.length
    for name in one.ended:
        counted[one.requests[name].tenant] += 1
    return counted


SIZES = st.tuples(st.integers(1, PROMPT), st.integers(1, ANSWER))


@settings(max_examples=25, deadline=None, derandomize=True, phases=[Phase.explicit, Phase.generate])
@given(
    tenants=st.lists(
        st.tuples(st.lists(SIZES, min_size=1, max_size=3), st.integers(PLACES, 20)), min_size=2, max_size=4
    ),
    ahead=st.sampled_from([0, 1]),
    pages=st.sampled_from([400, 16]),
)
def test_tenants_that_always_have_requests_waiting_get_equal_tokens(
    tenants: list[tuple[list[tuple[int, int]], int]], ahead: int, pages: int
) -> None:
    """Each tenant has requests of its own sizes, and keeps its own number of them waiting. At every moment the tokens
    of two tenants differ by less than two full batches, as in the paper on virtual token counters."""
    one, bound = engine(pages, ahead=ahead), 2 * PLACES * (PROMPT + ANSWER)
    names = [f"t{number}" for number in range(len(tenants))]
    sent = Counter[str]()
    for _ in range(400):
        queued = Counter(each.tenant for each in waiting_of(one.scheduler))
        for name, (sizes, depth) in zip(names, tenants, strict=True):
            for _ in range(depth - queued[name]):
                prompt, answer = sizes[sent[name] % len(sizes)]
                one.submit(request(f"{name}-{sent[name]}", prompt, answer, arrival=one.now, tenant=name))
                sent[name] += 1
        batch = one.step()
        assert pages < 400 or ahead or len(batch) == PLACES  # no place is empty while a request waits
    found = tokens(one)
    assert sum(found.values()) > 2 * bound
    assert max(found.values()) - min(found[name] for name in names) <= bound
    one.check()


def test_a_modest_request_is_computed_in_the_next_step_however_many_a_greedy_tenant_has_sent() -> None:
    one = engine()
    flood(one, "greedy", 500)
    for _ in range(3):
        one.step()
    assert places(one) == {"greedy": PLACES}
    one.submit(request("one", 8, 1, arrival=one.now, tenant="modest"))
    batch = one.step()
    assert "one" in {piece.request.id for piece in batch}
    assert one.delivered["one"]
    assert one.scheduler.running_set.num_preemptions == 1  # its place was made by one preemption
    assert len(one.step()) == PLACES  # and is not left empty after it


def test_the_step_that_makes_a_place_for_a_request_has_tokens_for_it_too() -> None:
    one = engine(places=2)
    flood(one, "greedy", 1, prompt=640)
    flood(one, "greedy", 1)
    one.step()
    assert places(one) == {"greedy": 2}
    one.submit(request("one", 8, 1, arrival=one.now, tenant="modest"))
    lengths = {piece.request.id: piece.length for piece in one.step()}
    assert lengths.get("one") == 8, "no tokens are reserved for it: the long prompt took them all"


@pytest.mark.parametrize("cache", [PagedCache, PrefixCache])
@pytest.mark.parametrize("ahead", [0, 1])
def test_a_greedy_tenant_gives_up_pages_too(ahead: int, cache: type[PagedCache]) -> None:
    """A few requests hold the whole pool, and grow: each step at most one of them is preempted."""
    one = engine(pages=40, places=8, ahead=ahead, cache=cache)
    flood(one, "greedy", 50, prompt=24, answer=100)
    for _ in range(20):
        one.step()
    start = one.now
    one.submit(request("one", 40, 1, arrival=start, tenant="modest"))
    while not one.requests["one"].finished:
        one.step()
    assert one.now - start <= 8 + 2 * ahead
    one.run().check_the_end()


def test_a_place_is_made_for_a_long_prompt_too() -> None:
    one = engine(places=2)
    flood(one, "greedy", 2)
    one.step()
    one.submit(request("one", 640, 1, arrival=one.now, tenant="modest"))
    one.step()
    assert places(one) == {"greedy": 1, "modest": 1}


def test_no_request_of_another_tenant_is_preempted_for_pages_that_the_next_commit_frees() -> None:
    one = engine(pages=12, places=8, ahead=1)
    flood(one, "greedy", 3, prompt=14, answer=3)
    one.step()
    one.submit(request("one", 8, 1, arrival=one.now, tenant="modest"))
    one.step()
    assert one.scheduler.running_set.did_not_fit is not None
    one.scheduler.finish(next(iter(one.requests.values())), FinishReason.ABORT, one.now)
    while not one.requests["one"].finished:
        one.step()
    assert one.scheduler.running_set.num_preemptions == 0


def test_a_tenant_is_charged_for_what_is_not_cached() -> None:
    one = engine(cache=PrefixCache)
    one.submit(request("first", [5] * 9, 30, tenant="t"))
    one.step()
    before = share_of(one.scheduler).served["t"]
    one.submit(request("again", [5] * 9, 30, tenant="t"))
    one.step()
    charged = share_of(one.scheduler).served["t"] - before
    assert charged == 1 + 2, "of its nine tokens eight are cached: it computes one, and each request draws one"


@pytest.mark.parametrize(("total", "theirs"), [(8, 4), (7, 3)])
def test_places_are_shared_equally_and_then_little_is_preempted(total: int, theirs: int) -> None:
    one = engine(places=total)
    flood(one, "greedy", 100)
    one.step()
    flood(one, "other", 100)
    for _ in range(8):
        one.step()
    assert places(one) == {"greedy": total - theirs, "other": theirs}
    preemptions = one.scheduler.running_set.num_preemptions
    assert preemptions == theirs
    while one.scheduler.sequences:
        one.step()
    assert one.scheduler.running_set.num_preemptions - preemptions <= 200 / 4


def test_no_place_is_made_for_a_tenant_that_has_had_more_tokens() -> None:
    one = engine()
    flood(one, "new", PLACES)
    one.step()
    share_of(one.scheduler).served["spent"] = 100.0
    flood(one, "spent", 1, answer=1)
    for _ in range(4):
        one.step()
        assert (places(one), one.scheduler.running_set.num_preemptions) == ({"new": PLACES}, 0)
    while share_of(one.scheduler).served["new"] <= 100:
        one.step()
    assert "spent" not in places(one)
    one.step()
    assert one.delivered[next(name for name in one.requests if name.startswith("spent"))]


def test_requests_of_one_tenant_are_preempted_for_no_other_of_its_own() -> None:
    one = engine()
    flood(one, "alone", 100)
    one.run().check_the_end()
    assert one.scheduler.running_set.num_preemptions == 0


def test_the_one_that_runs_the_most_gives_up_a_page_when_another_needs_one() -> None:
    """The first in rank is not preempted, nor the only request of a tenant while another has two."""
    one = engine(pages=18, places=8)
    flood(one, "greedy", 3, prompt=16, answer=20)
    one.submit(request("late", 16, 20, arrival=1, tenant="modest"))
    while not preempted_of(one.scheduler):
        one.step()
    assert [each.tenant for each in preempted_of(one.scheduler)] == ["greedy"]
    assert next(iter(one.scheduler.running_set.running)).request.id.endswith("-0")
    one.run().check_the_end()


def test_a_tenant_does_not_save_up_tokens_while_it_sends_nothing() -> None:
    one = engine()
    flood(one, "busy", 200, answer=8)
    flood(one, "idle", 1, answer=1)
    for _ in range(200):
        one.step()
    before = tokens(one)
    flood(one, "idle", 200, answer=8)
    for _ in range(100):
        one.step()
    new = tokens(one) - before
    assert abs(new["busy"] - new["idle"]) <= 2 * PLACES * 16, f"tokens since both send: {dict(new)}"


def test_a_tenant_that_is_ahead_is_not_forgotten_between_two_of_its_requests() -> None:
    """It sends as much as fits, waits for all of it, and sends again. That gains it nothing."""
    one = engine()
    flood(one, "steady", 400, prompt=1, answer=16)
    for _ in range(12):
        flood(one, "bursts", PLACES, prompt=1, answer=16)
        while any(sequence.request.tenant == "bursts" for sequence in one.scheduler.sequences):
            one.step()
    found = tokens(one)
    assert found["bursts"] <= found["steady"] + 2 * PLACES * 17, f"pauses gain tokens: {dict(found)}"


def test_a_tenant_that_is_ahead_is_not_passed_by_new_ones_for_ever() -> None:
    """In every step a tenant arrives that was never seen, and there is no place to spare."""
    one = engine(places=1)
    flood(one, "old", 30, prompt=8, answer=1)
    for _ in range(10):
        one.step()
    last = f"old{0}-29"
    steps = 0
    while not one.requests[last].finished:
        flood(one, f"new{steps}.", 1, prompt=8, answer=1)
        one.step()
        steps += 1
        assert steps < 600, "new tenants pass a request for ever"
    assert len(share_of(one.scheduler).served) < 600, "counts of tenants that have left are kept"


def test_the_counts_of_tenants_that_have_left_are_dropped() -> None:
    one = engine()
    flood(one, "always", 400)
    for number in range(300):
        flood(one, f"visitor{number}.", 1, answer=1)
        one.step()
    share = share_of(one.scheduler)
    assert len(share.served) < 40, "counts of tenants that have left are kept"
    one.run()
    assert share.served == {}


@pytest.mark.parametrize("policy", [ByPriority(30), LongestPrefixFirst(30)])
def test_a_policy_orders_the_requests_of_a_tenant_and_not_the_tenants(policy: ByPriority | LongestPrefixFirst) -> None:
    """Any client may set its own priority, or repeat a prompt that is cached."""
    cache = PrefixCache(200, 4)
    budget = TokenBudget(64, 64)
    one = Engine(Scheduler(cache, EOS, budget, policy=policy, turns=FairQueues, max_running=1, watermark=0))
    one.submit(request("seed", [5] * 41, 1, tenant="greedy"))
    one.run()
    prompts = {"low": [6] * 41, "high": [5] * 41}
    for number in range(3):
        for name, prompt in prompts.items():
            priority = -8 if name == "high" else 8
            one.submit(request(f"{name}{number}", prompt, 1, priority=priority, tenant="greedy"))
    one.submit(*(request(f"m{number}", [7] * 41, 1, tenant="modest") for number in range(3)))
    one.run().check_the_end()
    order = list(dict.fromkeys(piece.request.id for batch in one.batches for piece in batch))
    greedy = [name for name in order if name[0] in "lh"]
    assert [name[0] for name in greedy] == ["h"] * 3 + ["l"] * 3
    assert order.index("m0") <= 2
    assert max(order.index(f"m{number}") for number in range(3)) <= 7  # what is cached costs nothing


def sequence(name: str, number: int, tenant: str, tokens: int = 4) -> SequenceState:
    return SequenceState(request(name, tokens, tenant=tenant), (0.0, number))


def test_a_tenant_that_is_ahead_keeps_its_count_while_it_has_no_requests() -> None:
    share = FairShare()
    share.enter("a")
    share.enter("b")
    share.charge("a", 100)
    share.leave("a")
    assert share.served == {"a": 100, "b": 0}, "a is ahead of the virtual time, which is 50"
    share.enter("a")
    assert share.served["a"] == 100, "a tenant that leaves and comes back has had the tokens that it had"
    share.leave("a")
    share.leave("b")
    assert share.served == {}, "no tenant has a request: no count is kept"


def test_the_tenant_with_the_fewest_tokens_is_next_with_its_requests_before_counted() -> None:
    share = FairShare()
    queues = {
        "a": [sequence(f"a{n}", n, "a", 10) for n in range(3)],
        "b": [sequence(f"b{n}", n, "b", 4) for n in range(3)],
    }
    for tenant in queues:
        share.enter(tenant)
    share.charge("b", 6)
    order = [entry.request.id for entry in share.in_turn(queues)]
    wanted = ["a0", "b0", "a1", "b1", "b2", "a2"]
    assert order == wanted, f"a has had 0 tokens and prompts of 10, b has had 6 and prompts of 4; order: {order}"

import random
from collections import Counter
from typing import Any

import pytest

from phase0_request import Request
from phase1_kv_pool import PagedCache
from phase3_chunked_prefill.budget import TokenBudget
from phase4_radix.prefix_cache import PrefixCache
from phase5_continuous.policies import (
    POLICIES,
    ByPriority,
    FirstComeFirstServed,
    LongestPrefixFirst,
    Policy,
)
from phase5_continuous.scheduler import Scheduler
from tests.phase5_continuous.support import EOS, Engine, preempted_of, request


def engine(by: Policy, cache: PagedCache | None = None, **more: Any) -> Engine:
    cache = cache or PagedCache(200, 4)
    return Engine(Scheduler(cache, EOS, TokenBudget(64, 64), policy=by, watermark=0, **more))


def admitted(one: Engine) -> list[str]:
    """All requests in the order of their first admission."""
    order: dict[str, None] = {}
    for batch in one.batches:
        order |= dict.fromkeys(piece.request.id for piece in batch)
    return list(order)


def test_first_come_first_served_admits_by_arrival_and_ignores_priority() -> None:
    one = engine(FirstComeFirstServed(), max_running=1)
    one.submit(*(request(name, arrival=at, priority=-at) for name, at in (("b", 2), ("a", 1), ("c", 3), ("d", 3))))
    one.run()
    assert admitted(one) == ["a", "b", "c", "d"]


def test_a_level_of_priority_is_worth_its_seconds_and_no_more() -> None:
    one = engine(ByPriority(10), max_running=1)
    one.submit(
        request("old", arrival=0, priority=1),  # counts as of 10
        request("urgent", arrival=15, priority=-1),  # as of 5
        request("equal", arrival=11, priority=0),
        request("late", arrival=21, priority=-1),  # as of 11, and submitted later
    )
    one.run()
    order = admitted(one)
    assert order == ["urgent", "old", "equal", "late"], f"they count as of 5, 10, 11 and 11 s; admitted: {order}"


def test_priorities_are_clamped_to_the_outermost_level() -> None:
    by, priorities = ByPriority(10), (-(2**31), -8, -7, 0, 8, 9, 2**31)
    ranks = [by.rank(request("r", priority=p)) for p in priorities]
    assert ranks == [-80, -80, -70, 0, 80, 80, 80], f"ranks of priorities {priorities}, 10 s a level, 8 levels: {ranks}"


def test_the_lowest_priority_is_preempted_first() -> None:
    one = Engine(Scheduler(PagedCache(9, 4), EOS, policy=ByPriority(10), watermark=0))
    one.submit(request("early", 8, 20, priority=1), request("late", 8, 20, priority=0))
    while not preempted_of(one.scheduler):
        one.step()
    lost = [each.id for each in preempted_of(one.scheduler)]
    assert lost == ["early"], f"early is of a lower priority, and 10 s behind late for it; preempted: {lost}"
    one.run().check_the_end()


def test_the_longest_cached_prefix_is_admitted_first() -> None:
    one = engine(LongestPrefixFirst(100), PrefixCache(200, 4), max_running=1)
    one.submit(request("first", [5] * 41))
    one.step()
    one.submit(
        request("nothing", [6] * 41, arrival=1),
        request("half", [5] * 20 + [7] * 21, arrival=2),
        request("most", [5] * 40 + [8], arrival=3),
    )
    one.run().check_the_end()
    order = admitted(one)
    assert order == ["first", "most", "half", "nothing"], f"the more is cached, the earlier; admitted: {order}"


def test_a_cached_prefix_is_worth_its_seconds_and_no_more() -> None:
    one = engine(LongestPrefixFirst(10), PrefixCache(200, 4), max_running=1)
    one.submit(request("first", [5] * 41))
    one.step()
    one.submit(request("old", [6] * 41, arrival=1), request("cached", [5] * 40 + [8], arrival=12))
    one.run()
    order = admitted(one)
    assert order == ["first", "old", "cached"], f"it is nearly all cached, worth 10 s, and came 11 s later: {order}"


BOUNDS: dict[Policy, float] = {FirstComeFirstServed(): 0, ByPriority(2): 32, LongestPrefixFirst(25): 25}


def test_every_policy_has_its_bound_here() -> None:
    assert {type(make()) for make in POLICIES.values()} == {*map(type, BOUNDS)}, "BOUNDS has one of each policy"


@pytest.mark.parametrize(("by", "bound"), BOUNDS.items(), ids=lambda by: type(by).__name__)
def test_no_request_is_passed_by_one_that_arrives_later_than_the_bound(by: Policy, bound: float) -> None:
    """Twice as many requests as can be served, with favoured ones among them."""
    assert by.bound == bound, f"the largest head start of one request over another under {by}"
    rng = random.Random(3)
    one = engine(by, PrefixCache(400, 4), max_running=2)
    one.submit(request("seed", [5] * 81, 1))
    one.run()
    for n in range(300):
        prompt = [5] * 4 * rng.choice([0, 0, 10, 20]) + [rng.randint(6, 99) for _ in range(8)]
        one.submit(request(f"r{n}", prompt, rng.randint(1, 6), arrival=one.now, priority=rng.choice([-9, -1, 0, 9])))
        one.step()
    one.run().check_the_end()
    passed = [later.arrival - earlier.arrival for earlier, later in passings(one)]
    longest = max(passed, default=0)
    assert longest <= bound, f"a request was passed by one that arrived {longest} s later; the bound is {bound} s"
    assert bound == 0 or longest > bound / 2, f"favoured requests pass others that came up to {longest} s before them"


def passings(one: Engine) -> list[tuple[Request, Request]]:
    """Pairs (earlier, later) in which the request that arrived later was admitted first."""
    order = [one.requests[name] for name in admitted(one)]
    return [
        (earlier, later)
        for place, later in enumerate(order)
        for earlier in order[place + 1 :]
        if later.arrival > earlier.arrival
    ]


@pytest.mark.parametrize("by", BOUNDS, ids=lambda by: type(by).__name__)
def test_only_requests_that_cannot_start_yet_are_passed_by_later_ones(by: Policy) -> None:
    """Some prompts are long, and some come in threes that share a prefix."""
    rng = random.Random(4)
    one = engine(by, PrefixCache(2000, 4), max_running=8)
    excused = set[str]()
    for n in range(150):
        kind = rng.choice(["plain", "plain", "plain", "long", "alike"])
        own = [100 + n] * rng.randint(70, 300) if kind == "long" else [100 + n] * rng.randint(4, 30)
        prompts = [[100 + n] * 40 + [k] * 9 for k in range(3)] if kind == "alike" else [own]
        for k, prompt in enumerate(prompts):
            priority = rng.choice([-9, 0, 9])
            one.submit(request(f"r{n}-{k}", prompt, rng.randint(1, 6), arrival=one.now, priority=priority))
            if kind != "plain":
                excused.add(f"r{n}-{k}")
        one.step()
    one.run().check_the_end()
    too_far = {earlier.id for earlier, later in passings(one) if later.arrival - earlier.arrival > by.bound}
    assert too_far <= excused
    assert by.bound or too_far  # and such requests are passed


@pytest.mark.parametrize("alike", [False, True])
def test_a_request_that_cannot_start_does_once_the_ones_before_it_had_half_of_the_steps(alike: bool) -> None:
    """Behind a long prompt, or waiting on a prefix as long, under a stream of short ones that would fill every step."""
    one = engine(FirstComeFirstServed(), PrefixCache(4000, 16))
    one.submit(request("first", [5] * 640))
    one.step()
    second = request("second", [5 if alike else 6] * 640, arrival=one.now)
    one.submit(second)
    while second.times.admitted is None:
        one.submit(*(request(f"s{one.now}-{n}", 24, max_tokens=1, arrival=one.now) for n in range(4)))
        one.step()
    assert len([earlier for earlier, _ in passings(one) if earlier is second]) > 10
    assert 640 / 64 < second.times.admitted <= second.arrival + 640 / 32


def test_preempted_requests_resume_by_rank_whatever_is_cached_of_them() -> None:
    one = engine(LongestPrefixFirst(100), PrefixCache(200, 4), max_running=3)
    one.submit(request("a"), request("b", 3), request("c", [5] * 33))
    one.step()
    running = {sequence.request.id: sequence for sequence in one.scheduler.running_set.running}
    for name in "bc":
        one.scheduler.running_set.leave(running[name])
    batch = one.step()
    assert [piece.request.id for piece in batch] == ["a", "b", "c"]
    assert batch.slices[2].start == 32
    one.run().check_the_end()


def test_a_policy_orders_only_the_first_eight_candidates() -> None:
    asked = Counter[int]()

    class Reversed(FirstComeFirstServed):
        def head_start(self, request: Request, cache: PagedCache) -> float:
            asked[one.steps] += 1
            return 2 * request.arrival

    one = engine(Reversed(), max_running=4)
    one.submit(*(request(f"r{n}", arrival=n) for n in range(100)))
    one.run()
    assert max(asked.values()) == 8
    assert admitted(one)[:4] == ["r7", "r6", "r5", "r4"]

"""Admission by itself: which requests enter a step, in which order; and prefixes in progress."""

import pytest

from phase0_request import QueueFullError, Request
from phase1_kv_pool import PagedCache
from phase3_chunked_prefill.budget import StepBudget, TokenBudget
from phase3_chunked_prefill.chunker import StepPlan
from phase4_radix.prefix_cache import PrefixCache
from phase5_continuous.admission import Admission, PrefixesInProgress
from phase5_continuous.fairness import FairQueue
from phase5_continuous.policies import FirstComeFirstServed
from phase5_continuous.running import RunningSet, SequenceState
from tests.phase5_continuous.support import request


def state(one: Request, number: int) -> SequenceState:
    return SequenceState(one, (0.0, number), one.total, one.total + 9)


def admission(
    *prompts: int | list[int],
    pages: int = 100,
    max_running: int = 8,
    limit: int | None = None,
    chunk: int = 32,
    cache: type[PagedCache] = PagedCache,
) -> tuple[Admission, list[SequenceState]]:
    running_set = RunningSet(cache(pages, 4), watermark=0)
    one = Admission(FirstComeFirstServed(), running_set, max_running, chunk, FairQueue(limit))
    states = [state(request(f"r{n}", prompt), n) for n, prompt in enumerate(prompts)]
    for sequence in states:
        one.add(sequence)
    return one, states


def admitted(one: Admission, tokens: int = 64, chunk: int = 32) -> dict[str, int]:
    """The requests that enter a step of so many tokens, and the lengths of their slices."""
    budget = StepBudget.of_step(TokenBudget(chunk, tokens), 4, 0, one.pending_lengths())
    step: StepPlan[SequenceState] = StepPlan(budget, [], [])
    one.admit(step, now=0.0)
    assert [sequence.request for sequence in step.sequences] == [piece.request for piece in step.slices]
    return {piece.request.id: piece.length for piece in step.slices}


def test_requests_are_admitted_in_order_until_the_tokens_are_used_up() -> None:
    one, (_, _, third) = admission(30, 30, 30)
    assert admitted(one) == {"r0": 30, "r1": 30, "r2": 4}
    assert not one.waiting
    one, (_, _, third) = admission(32, 32, 30)
    assert admitted(one) == {"r0": 32, "r1": 32}
    assert list(one.waiting) == [third]


def test_no_more_than_max_running_requests_are_admitted() -> None:
    one, _ = admission(4, 4, 4, max_running=2)
    assert admitted(one) == {"r0": 4, "r1": 4}, "two requests may run"
    assert not one.is_open
    assert one.pending_lengths() == []
    assert admitted(one) == {}


def test_a_request_that_does_not_fit_is_not_passed_until_pages_are_freed() -> None:
    one, (first, _, _) = admission(20, 30, 4, pages=10)
    assert admitted(one) == {"r0": 20}
    assert one.running_set.pool_full
    assert not one.is_open
    one.running_set.finish(first)
    assert admitted(one) == {"r1": 30, "r2": 4}


def test_admission_tries_a_new_request_although_the_pool_was_full() -> None:
    one, _ = admission(20, 30, pages=10)
    admitted(one)
    assert not one.is_open
    one.add(state(request("urgent", 4), -1))
    assert admitted(one) == {"urgent": 4}


def test_a_tenant_is_charged_for_what_is_not_cached() -> None:
    one, (first,) = admission([5] * 9, cache=PrefixCache)
    admitted(one)
    first.request.advance(0, 9)
    one.running_set.cache.publish(first.request)
    before = one.share.served[""]
    one.add(state(request("again", [5] * 9), 1))
    assert admitted(one) == {"again": 1}
    assert one.share.served[""] - before == 1, "of its nine tokens eight are cached: it has to compute one"


def test_preempted_requests_resume_before_waiting_ones_are_admitted() -> None:
    one, (first, second, _) = admission(8, 8, 8, max_running=2)
    assert admitted(one) == {"r0": 8, "r1": 8}
    for sequence in (second, first):
        one.running_set.preempt(sequence)
    assert admitted(one, tokens=12, chunk=12) == {"r0": 8, "r1": 4}


def test_room_is_made_for_another_tenant_unless_pages_are_about_to_be_freed() -> None:
    one, (first, _) = admission(8, 8, max_running=2)
    admitted(one)
    one.add(SequenceState(request("modest", 8, tenant="modest"), (0.0, 9), 8, 17))
    one.share.served["modest"] = 0.0
    one.running_set.finished_in_flight = 1
    one.make_room()
    one.running_set.finished_in_flight, one.running_set.pending_preemption = 0, first
    one.make_room()
    assert one.running_set.num_preemptions == 0, "the next commit frees pages, and a request was preempted for some"
    one.running_set.pending_preemption = None
    one.make_room()
    assert one.running_set.num_preemptions == 1
    assert admitted(one) == {"modest": 8}


def test_room_is_made_for_a_long_prompt_too() -> None:
    one, _ = admission(8, 8, max_running=2)
    admitted(one)
    one.add(SequenceState(request("modest", 40, tenant="modest"), (0.0, 9), 40, 49))
    one.share.served["modest"] = 0.0
    one.make_room()
    assert one.running_set.num_preemptions == 1, "the next in turn is a long prompt of another tenant: it gets a place"


def test_short_prompts_pass_a_long_one_when_the_tokens_for_long_ones_are_used_up() -> None:
    one, (_, second, _) = admission(100, 100, 10, chunk=32)
    assert one.pending_lengths() == [10], "tokens are reserved for the short prompt, not for the long ones"
    assert admitted(one, tokens=42) == {"r0": 32, "r2": 10}
    assert list(one.waiting) == [second]


def test_only_long_prompts_are_offered_if_no_short_one_waits() -> None:
    one, _ = admission(100, 50)
    assert one.pending_lengths() == [100, 50]


def test_the_queue_limit_refuses_a_request() -> None:
    one, _ = admission(4, 4, limit=2)
    with pytest.raises(QueueFullError):
        one.add(state(request("more"), 2))
    assert len(one.waiting) == 2


# Prefixes in progress.


def prefixes(*prompts: list[int], **more: object) -> tuple[PrefixesInProgress, list[SequenceState]]:
    """The first of these requests runs and computes its prompt, in pages of four tokens that are shared."""
    running_set = RunningSet(PrefixCache(100, 4), watermark=0)
    states = [state(request(f"r{n}", prompt, **more), n) for n, prompt in enumerate(prompts)]  # type: ignore[arg-type]
    running_set.allocate(states[0], 0.0)
    one = PrefixesInProgress(running_set.cache)
    one.add(states[0])
    return one, states


def advance(one: PrefixesInProgress, sequence: SequenceState, length: int) -> None:
    sequence.request.advance(sequence.request.computed, length)
    one.cache.publish(sequence.request)


def test_a_request_waits_until_all_shared_full_pages_are_computed() -> None:
    one, (first, second) = prefixes([5] * 30, [5] * 18 + [6] * 9)
    assert one.in_progress(second)
    assert (second.waiting_on, second.waiting_until) == (first, 16)
    for _ in range(3):
        advance(one, first, 4)
        assert one.known_in_progress(second)
        assert one.in_progress(second)
    advance(one, first, 4)
    assert not one.known_in_progress(second)
    assert not one.in_progress(second)
    assert second.waiting_on is None


@pytest.mark.parametrize(("length", "waits"), [(4, False), (5, True)])
def test_no_request_waits_for_the_page_of_its_last_token(length: int, waits: bool) -> None:
    one, (_, second) = prefixes([5] * 30, [5] * length)
    assert one.in_progress(second) is waits


def test_a_request_stops_waiting_when_the_other_one_stops_running() -> None:
    one, (first, second) = prefixes([5] * 30, [5] * 30)
    assert one.in_progress(second)
    first.schedulable = False
    assert not one.known_in_progress(second)
    assert not one.in_progress(second)


def test_no_request_waits_on_another_salt_or_in_a_cache_that_does_not_share() -> None:
    one, (_, _) = prefixes([5] * 30, [5] * 30)
    assert not one.in_progress(state(request("salted", [5] * 30, cache_salt="other"), 2))
    plain = PrefixesInProgress(PagedCache(10, 4))
    running = state(request("a", [5] * 30), 0)
    RunningSet(plain.cache, 0).allocate(running, 0.0)
    plain.add(running)
    assert not plain.in_progress(state(request("b", [5] * 30), 1))

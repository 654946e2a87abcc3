"""Admission by itself: what a tenant is charged, and when room is made for another."""

from phase0_request import Request
from phase0_request.queue import SequenceState
from phase1_kv_pool import PagedCache
from phase3_chunked_prefill.budget import StepBudget, TokenBudget
from phase3_chunked_prefill.chunker import StepPlan
from phase4_radix.prefix_cache import PrefixCache
from phase5_continuous.admission import Admission
from phase5_continuous.fairness import FairQueue
from phase5_continuous.policies import FirstComeFirstServed
from phase5_continuous.running import RunningSet
from tests.phase5_continuous.support import request


def state(one: Request, number: int) -> SequenceState:
    return SequenceState(one, (0.0, number))


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
    step: StepPlan = StepPlan(budget, [], [])
    one.admit(step, now=0.0)
    assert [sequence.request for sequence in step.sequences] == [piece.request for piece in step.slices]
    return {piece.request.id: piece.length for piece in step.slices}


def test_a_tenant_is_charged_for_what_is_not_cached() -> None:
    one, (first,) = admission([5] * 9, cache=PrefixCache)
    admitted(one)
    first.request.advance(0, 9)
    one.running_set.cache.publish(first.request)
    before = one.share.served[""]
    one.add(state(request("again", [5] * 9), 1))
    assert admitted(one) == {"again": 1}
    assert one.share.served[""] - before == 1, "of its nine tokens eight are cached: it has to compute one"


def test_room_is_made_for_another_tenant_unless_pages_are_about_to_be_freed() -> None:
    one, (first, _) = admission(8, 8, max_running=2)
    admitted(one)
    one.add(state(request("modest", 8, tenant="modest"), 9))
    one.share.served["modest"] = 0.0
    one.running_set.leaving.append(first)
    one.make_room()
    assert one.running_set.num_preemptions == 0, "the next commit frees pages, and a request was preempted for some"
    one.running_set.leaving.clear()
    one.make_room()
    assert one.running_set.num_preemptions == 1
    assert admitted(one) == {"modest": 8}


def test_room_is_made_for_a_long_prompt_too() -> None:
    one, _ = admission(8, 8, max_running=2)
    admitted(one)
    one.add(state(request("modest", 40, tenant="modest"), 9))
    one.share.served["modest"] = 0.0
    one.make_room()
    assert one.running_set.num_preemptions == 1, "the next in turn is a long prompt of another tenant: it gets a place"


def test_short_prompts_pass_a_long_one_when_the_tokens_for_long_ones_are_used_up() -> None:
    one, (_, second, _) = admission(100, 100, 10, chunk=32)
    assert one.pending_lengths() == [10], "tokens are reserved for the short prompt, not for the long ones"
    assert admitted(one, tokens=42) == {"r0": 32, "r2": 10}
    assert list(one.waiting) == [second]

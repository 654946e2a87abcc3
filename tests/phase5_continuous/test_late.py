"""Requests that draw no token in a step, because their masks are not ready: they are computed again when they are."""

import random

import pytest

from phase0_request import FinishReason, Request
from phase1_kv_pool import PagedCache
from phase3_chunked_prefill.budget import TokenBudget
from phase4_radix.prefix_cache import PrefixCache
from phase5_continuous.extras.fairness import FairQueues
from phase5_continuous.scheduler import Scheduler
from tests.phase5_continuous.support import EOS, Engine, preempted_of, request
from tests.phase5_continuous.test_forced import forces

AHEAD = pytest.mark.parametrize("ahead", [0, 1])


@AHEAD
@pytest.mark.parametrize("cache", [PagedCache, PrefixCache])
@pytest.mark.parametrize("seed", range(6))
def test_outputs_of_late_requests_are_those_of_requests_alone(
    cache: type[PagedCache] | type[PrefixCache], seed: int, ahead: int
) -> None:
    """In a pool that is too small, with forced tokens, aborts and steps that raise."""
    rng = random.Random(seed)
    budget = TokenBudget(rng.choice([3, 4]), rng.choice([4, 16]))
    scheduler = Scheduler(cache(12, 4), EOS, budget, max_running=5, ahead=ahead)
    engine = Engine(scheduler, forces, lambda one: rng.choice([0, 0, 1, 3]) if int(one.id) % 2 else 0)
    for number in range(30):
        engine.submit(request(str(number), rng.randint(1, 12), rng.randint(1, 30), ignore_eos=rng.random() < 0.7))
        engine.step()
        engine.check()
        if number % 7 == 3:
            scheduler.finish(engine.requests[str(number - 1)], FinishReason.ABORT, engine.now)
            engine.check()
        if number % 9 == 5:
            engine.discard_in_flight()
            engine.check()
    engine.run().check_the_end()
    assert scheduler.running_set.num_preemptions > 0


@AHEAD
def test_a_late_request_takes_part_in_no_step_until_it_can_draw(ahead: int) -> None:
    waits = {"late": 8}
    engine = Engine(Scheduler(PagedCache(64, 4), ahead=ahead), delays=lambda one: waits.pop(one.id, 0))
    engine.submit(request("late", 8, 3), request("other", 4, 12))
    engine.run().check_the_end()
    lengths = [piece.length for batch in engine.batches for piece in batch if piece.request.id == "late"]
    void = [1] if ahead else []
    assert lengths == [8, *void, 1, 1, 1], "of the prompt, the last token alone is computed again"
    assert [batch.num_tokens for batch in engine.batches][2 * ahead + 1 : 6] == [1] * (5 - 2 * ahead), (
        "the other goes on"
    )


@AHEAD
def test_when_all_wait_there_is_no_step_and_no_request_is_ended(ahead: int) -> None:
    waits = {"a": 8, "b": 9}
    engine = Engine(Scheduler(PagedCache(64, 4), ahead=ahead), delays=lambda one: waits.pop(one.id, 0))
    engine.submit(request("a", 4, 3), request("b", 4, 3))
    empty = sum(not engine.step() for _ in range(6))
    assert empty > 0
    assert engine.scheduler.has_blocked
    engine.run().check_the_end()


def test_the_loop_yields_no_step_while_all_wait() -> None:
    waits = {"a": 8}
    engine = Engine(Scheduler(PagedCache(64, 4)), delays=lambda one: waits.pop(one.id, 0))

    def clock() -> float:
        engine.steps += 1
        return 0.0

    engine.core.clock = clock
    engine.submit(request("a", 4, 3))
    assert [step.batch.num_tokens for step in engine.core.run()] == [4, 1, 1, 1]


def test_a_late_request_can_be_ended() -> None:
    engine = Engine(Scheduler(PagedCache(64, 4)), delays=lambda one: 10_000)
    engine.submit(request("a", 4, 3))
    engine.step()
    assert engine.scheduler.has_blocked
    assert engine.scheduler.finish(engine.requests["a"], FinishReason.TIMEOUT, 1.0)
    assert not engine.scheduler.has_blocked
    engine.run()


@pytest.mark.parametrize("more", [[], [1]])
def test_a_late_request_holds_up_none_that_shares_its_prefix(more: list[int]) -> None:
    shared = [*range(100, 112)]
    waits = {"late": 50}
    engine = Engine(Scheduler(PrefixCache(64, 4)), delays=lambda one: waits.pop(one.id, 0))
    engine.submit(request("late", [*shared, *more], 2), request("other", [*shared, *more, 2], 2))
    for _ in range(8):
        engine.step()
    assert engine.requests["other"].finished
    assert not engine.requests["late"].finished
    engine.run().check_the_end()


@pytest.mark.parametrize("waiting", [3, 12])
def test_late_requests_keep_no_places_from_another_tenant(waiting: int) -> None:
    """Their tenant has had no more tokens than the other one, and gets none while they wait."""
    scheduler = Scheduler(PagedCache(64, 4), turns=FairQueues, max_running=3)
    engine = Engine(scheduler, delays=lambda one: 1000 if one.tenant == "waits" else 0)
    engine.submit(*(request(f"{number}", 4, 2, tenant="waits") for number in range(waiting)))
    for _ in range(3):
        engine.step()
    for number in range(3):
        other = request(f"other{number}", 4, 40, tenant="other")
        engine.submit(other)
        for _ in range(60):
            engine.step()
            engine.check()
        assert other.finished


def test_a_late_request_is_preempted_before_one_that_draws() -> None:
    scheduler = Scheduler(PagedCache(64, 4), turns=FairQueues, max_running=2)
    engine = Engine(scheduler, delays=lambda one: 1000 if one.id == "late" else 0)
    engine.submit(request("late", 4, 40), request("draws", 4, 40))
    engine.step()
    engine.submit(request("other", 4, 9, tenant="other"))
    engine.step()
    assert [each.id for each in preempted_of(scheduler)] == ["late"]


def test_time_beside_tokens_is_charged_to_a_tenant() -> None:
    """Of two tenants that have had as many tokens, the one that was charged is the later one."""
    scheduler = Scheduler(PagedCache(64, 4), turns=FairQueues, max_running=1)
    engine, turns = Engine(scheduler), scheduler.turns
    assert isinstance(turns, FairQueues)
    for tenant in "ab":
        engine.submit(*(request(f"{tenant}{n}", 4, 4, tenant=tenant) for n in range(2)))
    turns.charge("a", 1000.0)
    turns.charge("nobody", 5.0)
    engine.run().check_the_end()
    assert "nobody" not in turns.share.served
    started: dict[Request, None] = dict.fromkeys(piece.request for batch in engine.batches for piece in batch)
    assert [one.tenant for one in started] == ["b", "b", "a", "a"]

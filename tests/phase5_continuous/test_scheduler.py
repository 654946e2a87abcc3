"""The scheduler as a whole: every request is served, none starves, and wrong options are refused."""

import random
from collections.abc import Callable
from typing import Any

import pytest

from phase0_request import FinishReason, QueueFullError, RequestState
from phase0_request.queue import SequenceState
from phase1_kv_pool import PagedCache
from phase3_chunked_prefill.budget import TokenBudget
from phase4_radix.prefix_cache import PrefixCache
from phase5_continuous.extras.invariants import SchedulerError, check
from phase5_continuous.scheduler import Scheduler
from tests.phase5_continuous.moments import engine, names
from tests.phase5_continuous.support import preempted_of, request, waiting_of


@pytest.mark.proof
@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("cache", [PagedCache, PrefixCache])
def test_each_request_has_the_output_that_it_has_alone(cache: type[PagedCache], ahead: int) -> None:
    """Random arrivals, chunks, shared prefixes, aborts, and a pool so small that it preempts all the time."""
    rng = random.Random(5)
    one = engine(40, 4, TokenBudget(12, 32), cache, max_running=8, ahead=ahead)
    arrivals = sorted(rng.randint(0, 300) for _ in range(120))
    for number, moment in enumerate(arrivals):
        while one.now < moment:
            one.step()
        prompt = [rng.choice([1, 2])] * rng.randint(0, 30) + [rng.randint(3, 99) for _ in range(rng.randint(1, 20))]
        one.submit(request(f"r{number}", prompt, rng.randint(1, 60), ignore_eos=rng.random() < 0.5, arrival=one.now))
        if rng.random() < 0.1:
            one.scheduler.finish(rng.choice(list(one.requests.values())), FinishReason.ABORT, one.now)
        one.check()
    one.run().check_the_end()
    assert one.scheduler.running_set.num_preemptions > 20
    reasons = list(one.ended.values())
    assert min(reasons.count(reason) for reason in (FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORT)) > 3


def test_running_then_preempted_then_waiting() -> None:
    one = engine(pages=9, max_running=2)
    one.submit(request("a", 15, max_tokens=18), request("b", 15, max_tokens=18), request("c", 4, max_tokens=9))
    while not preempted_of(one.scheduler):
        step = names(one.step())
        assert "c" not in step, f"two places, and a and b have them; in the step: {step}"
    b, c = one.requests["b"], one.requests["c"]
    states = [b.state, c.state]
    assert states == [RequestState.PREEMPTED, RequestState.WAITING], f"c fits, and may not pass b; b and c: {states}"
    while c.state is RequestState.WAITING:
        one.step()
    assert b.state is not RequestState.PREEMPTED, "c was admitted while b is preempted and waits for pages"
    one.run().check_the_end()


# No request starves.


@pytest.mark.parametrize("ahead", [0, 1])
def test_decodes_are_in_every_step_under_steady_arrivals(ahead: int) -> None:
    one = engine(1000, 16, TokenBudget(64, 64), max_running=256, ahead=ahead)
    one.submit(*(request(f"d{n}", 4, max_tokens=100) for n in range(8)))
    one.step()
    one.step()
    for n in range(50):
        one.submit(request(f"p{n}", 100, max_tokens=50))
        batch = one.step()
        assert {f"d{i}" for i in range(8)} <= set(names(batch))
        assert batch.num_tokens > 64 - 16


def test_a_long_prompt_under_a_steady_stream_of_short_ones_starts_at_once_and_keeps_half() -> None:
    """First come, first served: it starts after earlier requests, and later ones do not take its half of a step."""
    one = engine(4000, 16, TokenBudget(32, 64), max_running=256)
    one.submit(*(request(f"s{n}", 24, max_tokens=2) for n in range(10)))
    long = request("long", 640, max_tokens=2)
    one.submit(long)
    for step in range(100):
        if long.output_tokens:
            break
        one.submit(*(request(f"t{step}-{n}", 24, max_tokens=2) for n in range(3)))
        one.step()
    before = -(-10 * 24 // 32)
    assert long.times.admitted is not None
    assert long.times.admitted <= before
    assert long.times.tokens[0] <= before + 640 / (32 - 16) + 1
    assert one.requests["t0-0"].times.tokens[0] < long.times.tokens[0]  # and the long prompt does not block them
    assert len(waiting_of(one.scheduler)) > 20  # more requests arrive than can be served


def test_short_prompts_pass_a_long_one_that_cannot_start_until_it_can() -> None:
    one = engine(4000, 16, TokenBudget(64, 64))
    one.submit(request("first", 640))
    one.step()
    one.submit(request("second", 640), *(request(f"s{n}", 32, max_tokens=1) for n in range(40)))
    started = []
    while one.requests["second"].state is RequestState.WAITING:
        started.append(names(one.step()))
    assert all("first" in batch and len(batch) == 2 for batch in started[:-2])
    first = one.requests["first"]
    assert first.output_tokens
    assert first.times.tokens[0] <= one.now <= first.times.tokens[0] + 2


@pytest.mark.parametrize(
    ("alike", "before", "step"),
    [(False, 8, 0), (False, 9, 0), (False, 30, 0), (True, 8, 0), (True, 9, 0), (True, 30, 2)],
)
def test_a_short_prompt_does_not_wait_behind_any_number_of_requests_that_cannot_start(
    alike: bool, before: int, step: int
) -> None:
    """Behind long prompts, or behind requests that wait on a prefix: these are looked up once each, eight at a time."""
    one = engine(9000, 16, TokenBudget(64, 128), PrefixCache)
    one.submit(*(request(f"l{n}", [5 + n * (not alike)] * 640, max_tokens=1) for n in range(before)))
    short = request("short", 10, max_tokens=1)
    one.submit(short)
    while not short.finished:
        one.step()
    assert short.times.admitted == step
    assert [r.times.admitted for r in one.requests.values()].count(None) >= before - 3
    one.run().check_the_end()


def test_only_the_first_256_of_the_queue_are_searched() -> None:
    one = engine(9000, 16, TokenBudget(64, 64))
    one.submit(*(request(f"l{n}", 70, max_tokens=1) for n in range(256)), request("short", 10, max_tokens=1))
    one.step()
    assert one.requests["short"].state is RequestState.WAITING, "a request beyond the first 256 was admitted"
    one.step()
    assert one.requests["short"].finished, "it is among the first 256 now: a long prompt has left the queue"


# Refusals, and the invariant check.


def test_a_request_that_can_never_be_served_is_refused() -> None:
    one = engine(pages=4, queue_limit=2)
    ended = request("a")
    ended.finish(FinishReason.ABORT, 0)
    with pytest.raises(
        ValueError, match="r can never be served: its prompt has 17 tokens, and the whole cache has room"
    ):
        one.submit(request("r", 17))
    with pytest.raises(ValueError, match="request a is finished; only a new request"):
        one.submit(ended)
    one.submit(request("b"), request("c"))
    with pytest.raises(ValueError, match="request b is here already"):
        one.submit(request("b"))
    with pytest.raises(QueueFullError, match="2 requests are already waiting"):
        one.submit(request("d"))
    assert set(one.requests) == {"b", "c"}
    one.run().check_the_end()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_running": 0}, "max_running must be an integer from 1, got 0"),
        ({"max_running": True}, "max_running must be an integer from 1, got True"),
        ({"queue_limit": 0}, "queue_limit must be an integer from 1, got 0"),
        ({"watermark": 1}, "watermark must be a number from 0 and below 1, got 1"),
        ({"watermark": "5%"}, "watermark must be a number .* got '5%'"),
        ({"ahead": 2}, "ahead must be an integer from 0 to 1, got 2"),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        engine(**options)


def first_running(scheduler: Scheduler) -> SequenceState:
    return next(iter(scheduler.running_set.running))


@pytest.mark.parametrize(
    ("breakage", "message"),
    [
        (lambda s: s.turns.add(first_running(s)), "r is running among the waiting"),
        (lambda s: s.running_set.running.remove(first_running(s)), "not of the same requests"),
        (lambda s: setattr(first_running(s), "num_scheduled", 3), "computed 4, scheduled 3, of 5"),
        (lambda s: setattr(first_running(s), "capacity", 16), "capacity 16"),
        (lambda s: s.running_set.leaving.append(first_running(s)), "a request is in two queues"),
        (lambda s: setattr(s.admission, "max_running", 0), "1 are running"),
    ],
)
def test_the_invariant_check_names_what_is_wrong(breakage: Callable[[Scheduler], object], message: str) -> None:
    one = engine()
    one.submit(request("r"))
    one.step()
    check(one.scheduler)
    breakage(one.scheduler)
    with pytest.raises(SchedulerError, match=message):
        check(one.scheduler)

import random
from collections.abc import Callable
from typing import Any

import pytest

from phase0_request import (
    Batch,
    FinishReason,
    QueueFullError,
    Request,
    RequestState,
    SamplingParams,
    StepOutput,
    TokenLogprobs,
)
from phase1_kv_pool import PagedCache
from phase3_chunked_prefill.budget import TokenBudget
from phase4_radix.prefix_cache import PrefixCache
from phase5_continuous.deadlines import Deadlines
from phase5_continuous.invariants import SchedulerError, check
from phase5_continuous.policies import ByPriority
from phase5_continuous.scheduler import Scheduler
from phase5_continuous.seat import Seat
from tests.phase5_continuous.support import EOS, Engine, alone, request


def engine(
    pages: int = 100,
    page_size: int = 4,
    budget: TokenBudget | None = None,
    cache: type[PagedCache] = PagedCache,
    **more: Any,
) -> Engine:
    more = {"watermark": 0, **more}
    return Engine(Scheduler(cache(pages, page_size), EOS, budget or TokenBudget(64, 64), **more))


def names(batch: Batch) -> list[str]:
    return [piece.request.id for piece in batch]


def lengths(batch: Batch) -> dict[str, int]:
    return {piece.request.id: piece.length for piece in batch}


# The whole.


@pytest.mark.proof
@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("cache", [PagedCache, PrefixCache])
def test_everyone_says_what_they_would_have_said_alone(cache: type[PagedCache], ahead: int) -> None:
    """Random arrivals, chunks, a pool so small that it preempts all the time, shared beginnings, aborts among them."""
    rng = random.Random(5)
    one = engine(40, 4, TokenBudget(12, 32), cache, max_running=8, ahead=ahead)
    arrivals = sorted(rng.randint(0, 300) for _ in range(120))
    for number, moment in enumerate(arrivals):
        while one.now < moment:
            one.step()
        prompt = [rng.choice([1, 2])] * rng.randint(0, 30) + [rng.randint(3, 99) for _ in range(rng.randint(1, 20))]
        one.submit(request(f"r{number}", prompt, rng.randint(1, 60), ignore_eos=rng.random() < 0.5, arrival=one.now))
        if rng.random() < 0.1:
            one.scheduler.abort(rng.choice(list(one.everyone.values())), one.now)
        one.check()
    one.run().check_the_end()
    assert one.scheduler.residents.preemptions > 20
    reasons = list(one.ended.values())
    assert min(reasons.count(reason) for reason in (FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORT)) > 3


def test_a_request_runs_from_its_prompt_to_its_last_token() -> None:
    one = engine(budget=TokenBudget(4, 8))
    a = request("a", 10, max_tokens=3)
    one.submit(a)
    batches = [one.step() for _ in range(6)]
    assert [[(p.start, p.length) for p in batch] for batch in batches] == [
        [(0, 4)],
        [(4, 4)],
        [(8, 2)],
        [(10, 1)],
        [(11, 1)],
        [],
    ]
    assert (a.output_tokens, a.finish_reason) == alone(a, EOS)
    assert (a.times.admitted, a.times.tokens, a.times.finished) == (0, [2, 3, 4], 4)
    assert not one.scheduler.has_work


def test_running_then_preempted_then_waiting() -> None:
    one = engine(pages=9, page_size=4, max_running=2)
    one.submit(request("a", 15, max_tokens=18), request("b", 15, max_tokens=18), request("c", 4, max_tokens=9))
    while not one.scheduler.residents.preempted:
        assert "c" not in names(one.step())
    b, c = one.everyone["b"], one.everyone["c"]
    assert [b.state, c.state] == [RequestState.PREEMPTED, RequestState.WAITING]  # c would fit, and does not pass b
    while c.state is RequestState.WAITING:
        one.step()
    assert b.state is not RequestState.PREEMPTED
    one.run().check_the_end()


# Starvation.


@pytest.mark.parametrize("ahead", [0, 1])
def test_fifty_steps_of_steady_arrivals_run_decodes_in_every_step(ahead: int) -> None:
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
    """First come, first served: it starts when those before it have, and nobody after it takes its half of a step."""
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
    assert one.everyone["t0-0"].times.tokens[0] < long.times.tokens[0]  # and does not block them either
    assert len(one.scheduler.admission.waiting) > 20  # more come than can be served


def test_a_large_prompt_does_not_block_those_behind_it() -> None:
    one = engine(4000, 16, TokenBudget(64, 64))
    long, short = request("long", 6400), request("short", 20)
    one.submit(long)
    one.step()
    one.submit(short)
    one.step()
    assert lengths(one.batches[-1]) == {"long": 32, "short": 20}
    assert short.output_tokens
    assert not long.output_tokens


def test_a_long_prompt_that_cannot_start_lets_short_ones_pass_and_then_starts() -> None:
    one = engine(4000, 16, TokenBudget(64, 64))
    one.submit(request("first", 640))
    one.step()
    one.submit(request("second", 640), *(request(f"s{n}", 32, max_tokens=1) for n in range(40)))
    started = []
    while one.everyone["second"].state is RequestState.WAITING:
        started.append(names(one.step()))
    assert all("first" in batch and len(batch) == 2 for batch in started[:-2])
    first = one.everyone["first"]
    assert first.output_tokens
    assert first.times.tokens[0] <= one.now <= first.times.tokens[0] + 2


@pytest.mark.parametrize(
    ("alike", "before", "step"),
    [(False, 8, 0), (False, 9, 0), (False, 30, 0), (True, 8, 0), (True, 9, 0), (True, 30, 2)],
)
def test_a_short_prompt_does_not_wait_behind_however_many_that_cannot_start(
    alike: bool, before: int, step: int
) -> None:
    """Behind long ones, or behind those who wait for a prefix: each of these is looked up once, eight at a time."""
    one = engine(9000, 16, TokenBudget(64, 128), PrefixCache)
    one.submit(*(request(f"l{n}", [5 + n * (not alike)] * 640, max_tokens=1) for n in range(before)))
    short = request("short", 10, max_tokens=1)
    one.submit(short)
    while not short.finished:
        one.step()
    assert short.times.admitted == step
    assert [r.times.admitted for r in one.everyone.values()].count(None) >= before - 3
    one.run().check_the_end()


def test_a_line_is_searched_so_far_and_no_further() -> None:
    one = engine(9000, 16, TokenBudget(64, 64))
    one.submit(*(request(f"l{n}", 70, max_tokens=1) for n in range(256)), request("short", 10, max_tokens=1))
    one.step()
    assert one.everyone["short"].state is RequestState.WAITING
    one.step()
    assert one.everyone["short"].finished  # the first of the long ones has left the line


def test_the_sequence_limit_holds_for_those_who_run() -> None:
    one = engine(max_running=3)
    one.submit(*(request(f"r{n}", 4, max_tokens=3 + n) for n in range(7)))
    sizes = []
    while one.scheduler.seats:
        sizes.append(len(one.step()))
    assert max(sizes) == 3
    assert sizes[:5] == [3, 3, 3, 3, 3]
    one.check_the_end()


# Memory.


def test_those_who_run_have_the_watermark_to_grow_into() -> None:
    one = engine(pages=20, page_size=4, watermark=0.25)  # 5 pages
    one.submit(request("a", 30, max_tokens=2), request("b", 28, max_tokens=2), request("c", 1, max_tokens=2))
    assert names(one.step()) == ["a", "b"]  # 8 + 7 pages, 5 to spare
    one.run().check_the_end()
    two = engine(pages=20, page_size=4, watermark=0.25)
    two.submit(request("a", 30, max_tokens=2), request("b", 29, max_tokens=2), request("c", 1, max_tokens=2))
    assert names(two.step()) == ["a"]  # a page too many; and c waits behind b though it would fit
    two.run().check_the_end()


def test_who_is_alone_but_for_one_that_lands_leaves_the_watermark() -> None:
    one = engine(pages=20, page_size=4, watermark=0.25, ahead=1)  # 5 pages
    one.submit(request("ends", 12))  # 3 pages
    one.plan()
    one.scheduler.abort(one.everyone["ends"], one.now)
    one.submit(request("next", 52))  # 13 pages
    assert not one.plan()
    one.commit()
    assert names(one.plan()) == ["next"]
    one.run().check_the_end()


def test_alone_a_request_may_have_the_whole_pool() -> None:
    one = engine(pages=5, page_size=4, watermark=0.9)
    one.submit(request("a", 17, max_tokens=4), request("b", 17, max_tokens=4))
    while one.scheduler.seats:
        assert len(one.step()) == 1
    one.check_the_end()
    assert set(one.ended.values()) == {FinishReason.LENGTH}


def test_the_last_in_rank_is_preempted_and_comes_back_first() -> None:
    one = engine(pages=9, page_size=4)
    one.submit(*(request(name, 8, max_tokens=20) for name in "abc"))
    while not one.scheduler.residents.preempted:
        one.step()
    one.submit(request("d", 1))
    c = one.everyone["c"]
    said = len(c.output_tokens)
    assert (c.state, c.computed, said) == (RequestState.PREEMPTED, 0, 5)
    while c.state is RequestState.PREEMPTED:
        one.step()
    (again,) = (piece for piece in one.batches[-1] if piece.request is c)
    assert (again.start, again.length) == (0, 8 + said)  # computed anew, and nothing said twice
    one.run().check_the_end()


def test_the_first_is_never_preempted_and_nobody_for_ever() -> None:
    """Six that would fill the pool alone, all at once. Each preemption is paid for by progress of one before."""
    one = engine(pages=10, page_size=4, max_running=6)
    one.submit(*(request(f"r{n}", 5, max_tokens=34) for n in range(6)))
    while one.scheduler.seats:
        first = min((seat for seat in one.scheduler.seats if not seat.request.finished), key=lambda seat: seat.key)
        one.step()
        assert first.request.state in (RequestState.RUNNING, RequestState.FINISHED)
        assert one.now < 400
    assert one.scheduler.residents.preemptions > 5
    one.check_the_end()


def test_preemption_finds_its_pages_again_in_a_cache_that_shares() -> None:
    computed = {}
    for cache in (PagedCache, PrefixCache):
        one = engine(pages=12, page_size=4, cache=cache)
        one.submit(request("a", 16, max_tokens=12), request("b", 16, max_tokens=20))
        one.run().check_the_end()
        assert one.scheduler.residents.preemptions > 0
        computed[cache] = sum(batch.num_tokens for batch in one.batches)
    assert computed[PagedCache] - computed[PrefixCache] == 5 * 4  # all that was full, but for one page that was evicted


def test_one_that_is_alone_is_not_preempted_for_pages_of_its_own() -> None:
    one = engine(pages=4, page_size=4)
    one.submit(request("a", 6, max_tokens=50))
    one.run().check_the_end()
    assert one.ended["a"] is FinishReason.ERROR
    assert one.scheduler.residents.preemptions == 0


def test_one_that_outgrows_the_whole_pool_ends_with_an_error_and_the_next_is_served() -> None:
    one = engine(pages=4, page_size=4)
    one.submit(request("a", 6, max_tokens=50), request("b", 6, max_tokens=5))
    one.run().check_the_end()
    a = one.everyone["a"]
    assert (a.finish_reason, len(a.output_tokens)) == (FinishReason.ERROR, 11)  # 16 slots, and a token more is known
    assert a.error == "out of memory: it needs 17 tokens, and the whole cache has room for 16"
    assert one.ended["b"] is FinishReason.LENGTH


def test_nobody_ends_for_want_of_memory_because_it_was_not_its_turn() -> None:
    """A step has room for one decode beside a prompt. It is the turn of `b`, which is the last in rank and finds no
    page: it goes, and the step is empty. That is no reason to end `a`."""
    one = engine(pages=4, page_size=4, budget=TokenBudget(2, 2))
    one.submit(request("a", 2, max_tokens=9), request("b", 2, max_tokens=9), request("c", 4, max_tokens=4))
    one.run().check_the_end()
    assert one.scheduler.residents.preemptions > 0
    assert set(one.ended.values()) == {FinishReason.LENGTH}


def test_when_the_one_that_did_not_fit_leaves_those_behind_it_enter() -> None:
    one = engine(pages=10, page_size=4)
    one.submit(request("runs", 4, max_tokens=36), request("large", 39), request("small", 4))
    one.step()
    assert names(one.step()) == ["runs"]
    one.scheduler.abort(one.everyone["large"], one.now)
    assert names(one.step()) == ["runs", "small"]
    one.run().check_the_end()


@pytest.mark.parametrize(("prompt", "max_tokens"), [(6, 11), (16, 1)])
def test_one_that_fits_exactly_is_served_to_the_end(prompt: int, max_tokens: int) -> None:
    one = engine(pages=4, page_size=4)
    one.submit(request("a", prompt, max_tokens))
    one.run().check_the_end()
    assert one.ended["a"] is FinishReason.LENGTH


def test_what_can_never_be_served_is_refused() -> None:
    one = engine(pages=4, page_size=4, queue_limit=2)
    ended = request("a")
    ended.abort(0)
    with pytest.raises(
        ValueError, match="r can never be served: its prompt has 17 tokens, and the whole cache has room"
    ):
        one.submit(request("r", 17))
    with pytest.raises(ValueError, match="request a is finished; only a new request"):
        one.submit(ended)
    one.submit(request("b"), request("c"))
    with pytest.raises(ValueError, match="request b is here already"):
        one.submit(request("b"))
    with pytest.raises(QueueFullError, match="2 requests wait already"):
        one.submit(request("d"))
    assert set(one.everyone) == {"b", "c"}
    one.run().check_the_end()


def test_who_found_too_few_pages_enters_when_some_are_released_and_others_still_run() -> None:
    one = engine(pages=10, page_size=4)
    one.submit(
        request("long", 16, max_tokens=8), request("short", 16, max_tokens=3), request("waits", 12, max_tokens=3)
    )
    while one.everyone["waits"].state is RequestState.WAITING:
        one.step()
    assert one.everyone["short"].finished
    assert not one.everyone["long"].finished
    one.run().check_the_end()


def test_when_nobody_runs_the_next_is_tried_whoever_failed_before() -> None:
    one = engine()
    one.submit(request("a"))
    one.scheduler.residents.full = True
    one.run().check_the_end()
    assert one.ended["a"] is FinishReason.LENGTH


def test_one_that_may_go_before_the_one_that_did_not_fit_is_tried() -> None:
    one = engine(pages=10, page_size=4, policy=ByPriority(10))
    one.submit(request("runs", 16, max_tokens=20), request("large", 32))
    one.step()
    assert one.scheduler.residents.full
    one.submit(request("urgent", 4, priority=-1))
    assert names(one.step()) == ["runs", "urgent"]
    one.run().check_the_end()


def test_nobody_is_preempted_for_pages_that_are_about_to_land() -> None:
    """`ends` has its last token one step late; its pages come with the next commit, and `grows` waits that long."""
    one = engine(pages=6, page_size=4, ahead=1)
    one.submit(*(request(name, 7, max_tokens=6) for name in ("grows", "ends", "other")))
    while one.everyone["grows"].total < 8 or not one.in_flight:
        one.step()
    one.scheduler.abort(one.everyone["ends"], one.now)
    assert (one.scheduler.residents.landing, one.scheduler.cache.usage.free) == (1, 0)
    one.run().check_the_end()
    assert one.scheduler.residents.preemptions == 0


# One prefix, computed once.


def prefix_engine(**more: Any) -> Engine:
    return engine(100, 4, TokenBudget(16, 64), PrefixCache, **more)


@pytest.mark.parametrize("ahead", [0, 1])
def test_identical_prompts_at_once_are_computed_once(ahead: int) -> None:
    one = prefix_engine(ahead=ahead)
    one.submit(*(request(name, [5] * 33, max_tokens=1) for name in "abcd"))
    one.run().check_the_end()
    assert sum(batch.num_tokens for batch in one.batches) == 33 + 3  # the last token each computes itself
    assert one.scheduler.cache.counts.duplicates == 0  # type: ignore[attr-defined]


def test_a_request_waits_only_for_the_pages_it_shares() -> None:
    one = prefix_engine()
    one.submit(request("a", [5] * 60, max_tokens=1), request("b", [5] * 18 + [6] * 10, max_tokens=1))
    one.submit(request("c", [7] * 20, max_tokens=1))
    assert lengths(one.step()) == {"a": 16, "c": 16}
    assert one.everyone["b"].state is RequestState.WAITING
    assert lengths(one.step())["b"] == 12  # 16 are cached now; the next page of a is another one
    one.run().check_the_end()


def test_nobody_waits_for_the_page_of_its_last_token_which_it_computes_itself() -> None:
    one = engine(100, 4, TokenBudget(12, 64), PrefixCache)
    one.submit(request("a", [5] * 16), request("b", [5] * 16))
    assert lengths(one.step()) == {"a": 12}
    assert lengths(one.step()) == {"a": 4, "b": 4}
    one.run().check_the_end()


def test_salts_do_not_wait_for_each_other_and_neither_does_a_cache_that_shares_nothing() -> None:
    one = prefix_engine()
    one.submit(*(request(name, [5] * 33, max_tokens=1, cache_salt=name) for name in "ab"))
    assert set(lengths(one.step())) == {"a", "b"}
    two = engine(100, 4, TokenBudget(16, 64))
    two.submit(*(request(name, [5] * 33, max_tokens=1) for name in "ab"))
    assert set(lengths(two.step())) == {"a", "b"}


def test_who_waits_for_one_that_leaves_computes_it_itself() -> None:
    one = prefix_engine()
    one.submit(request("a", [5] * 60), request("b", [5] * 60), request("c", [5] * 60))
    assert lengths(one.step()) == {"a": 16}
    one.scheduler.abort(one.everyone["a"], one.now)
    assert lengths(one.step()) == {"b": 16}
    one.run().check_the_end()
    assert one.everyone["c"].finish_reason is FinishReason.LENGTH


def test_nothing_is_kept_from_a_prompt_for_those_who_wait_for_it() -> None:
    one = engine(100, 4, TokenBudget(64, 64), PrefixCache)
    one.submit(request("a", [5] * 64 + [7] * 200, max_tokens=1))
    one.submit(*(request(name, [5] * 64, max_tokens=1) for name in "bc"))
    assert lengths(one.step()) == {"a": 32}  # it was not known yet that they would wait
    assert lengths(one.step()) == {"a": 64}
    assert lengths(one.step()) == {"a": 32, "b": 4, "c": 4}
    one.run().check_the_end()


def test_prompts_that_are_to_be_scored_do_not_wait_for_pages_that_they_could_not_use() -> None:
    one = prefix_engine()
    scored = SamplingParams(max_tokens=1, ignore_eos=True, prompt_logprobs=0)
    one.submit(*(Request(name, (5,) * 40, scored) for name in "abc"))
    assert lengths(one.step()) == {"a": 16, "b": 16, "c": 16}


def test_who_has_its_first_scores_waits_for_the_pages_of_those() -> None:
    """Preempted after 16 tokens, it may use their pages, which are being computed for another by now."""
    one = engine(100, 4, TokenBudget(8, 64), PrefixCache)
    again = Request("again", (5,) * 40, SamplingParams(max_tokens=1, ignore_eos=True, prompt_logprobs=0))
    again.score(0, [TokenLogprobs(-1.0, ())] * 16)
    one.submit(request("first", [5] * 40, max_tokens=1), again)
    assert [lengths(one.step()) for _ in range(3)] == [{"first": 8}, {"first": 8}, {"first": 8, "again": 8}]
    assert one.batches[-1].slices[1].start == 16


def test_others_pass_who_waits_for_a_prefix() -> None:
    one = prefix_engine()
    one.submit(request("a", [5] * 60), request("b", [5] * 60), request("c", [6] * 10))
    assert set(lengths(one.step())) == {"a", "c"}
    one.run().check_the_end()


# Ends from outside.


def waiting(one: Engine) -> None:
    one.submit(request("other", 8, max_tokens=28), request("r", 8, max_tokens=28))


def running(one: Engine) -> None:
    waiting(one)
    one.step()
    one.step()


def in_flight(one: Engine) -> None:
    running(one)
    one.plan()


def preempted(one: Engine) -> None:
    waiting(one)
    while not one.scheduler.residents.preempted:
        one.step()


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("moment", [waiting, running, in_flight, preempted])
@pytest.mark.parametrize("cache", [PagedCache, PrefixCache])
def test_abort_at_any_moment_ends_one_and_no_other(
    moment: Callable[[Engine], None], ahead: int, cache: type[PagedCache]
) -> None:
    one = engine(pages=9, page_size=4, cache=cache, ahead=ahead)
    moment(one)
    r = one.everyone["r"]
    said = len(one.said["r"])
    assert one.scheduler.abort(r, 99)
    assert not one.scheduler.abort(r, 100)
    assert (r.finish_reason, r.times.finished) == (FinishReason.ABORT, 99)
    one.check()
    while one.in_flight:
        one.commit()
    one.run().check_the_end()
    assert len(one.said["r"]) == said  # no token of it after the end
    assert one.ended == {"other": FinishReason.LENGTH, "r": FinishReason.ABORT}


def test_pages_in_flight_are_released_when_they_have_landed() -> None:
    one = engine(pages=9, page_size=4)
    in_flight(one)
    used = one.scheduler.cache.usage.referenced
    one.scheduler.abort(one.everyone["r"], one.now)
    assert one.scheduler.cache.usage.referenced == used
    with pytest.raises(ValueError, match="r is here already; ids are unique until their request has left"):
        one.submit(request("r"))
    one.commit()
    assert one.scheduler.cache.usage.referenced == used - 3
    one.submit(request("r"))


def test_an_end_from_outside_may_have_another_reason() -> None:
    one = engine()
    running(one)
    assert not one.scheduler.abort(request("r"), one.now)  # another request of the same name
    assert one.scheduler.finish(one.everyone["r"], FinishReason.STOP, one.now)  # a stop string in its text
    assert one.scheduler.finish(one.everyone["other"], FinishReason.ERROR, one.now, "its text is broken")
    assert not one.scheduler.finish(request("stranger"), FinishReason.ABORT, one.now)
    one.run()
    assert one.ended == {"r": FinishReason.STOP, "other": FinishReason.ERROR}


def test_a_stop_string_may_be_found_in_the_text_of_one_that_has_been_preempted_since() -> None:
    one = engine(pages=9, page_size=4)
    preempted(one)
    (seat,) = one.scheduler.residents.preempted
    assert one.scheduler.finish(seat.request, FinishReason.STOP, one.now)
    one.run()
    assert one.ended == {"other": FinishReason.LENGTH, "r": FinishReason.STOP}


def test_deadlines_end_who_waits_too_long_and_who_takes_too_long() -> None:
    one = engine(max_running=1, deadlines=Deadlines(queue=3, total=10))
    one.submit(request("runs", 4, max_tokens=14), request("waits"))
    one.submit(request("patient", 4, max_tokens=14), deadlines=Deadlines())
    one.run()
    ends = {name: (r.finish_reason, r.times.finished, len(r.output_tokens)) for name, r in one.everyone.items()}
    assert ends == {
        "runs": (FinishReason.TIMEOUT, 10, 10),
        "waits": (FinishReason.TIMEOUT, 3, 0),
        "patient": (FinishReason.LENGTH, 23, 14),
    }
    assert one.ended == {name: end[0] for name, end in ends.items()}


def test_a_preempted_request_has_met_its_queue_deadline() -> None:
    one = engine(pages=9, page_size=4, deadlines=Deadlines(queue=14))
    preempted(one)
    while one.now <= 14:
        assert one.everyone["r"].state is RequestState.PREEMPTED
        one.step()
    one.run().check_the_end()
    assert set(one.ended.values()) == {FinishReason.LENGTH}


def test_a_deadline_in_flight_ends_it_at_once_and_frees_it_later() -> None:
    one = engine(ahead=1, deadlines=Deadlines(total=2.5))
    one.submit(request("r", 4, max_tokens=30))
    for _ in range(4):
        one.step()
    r = one.everyone["r"]
    assert (r.finish_reason, r.times.finished) == (FinishReason.TIMEOUT, 3)
    one.run()
    assert one.said["r"] == r.output_tokens
    assert one.ended["r"] is FinishReason.TIMEOUT
    assert one.scheduler.cache.usage.referenced == 0


# What a step yields.


def test_a_failed_slice_ends_its_request_alone() -> None:
    one = engine()
    one.submit(request("a"), request("b"))
    one.plan()
    events = one.commit({0: "its logits are not finite"})
    a, b = one.everyone["a"], one.everyone["b"]
    assert (a.finish_reason, a.error) == (FinishReason.ERROR, "its logits are not finite")
    assert [(e.request, e.token is None, e.finish_reason) for e in events] == [
        (a, True, FinishReason.ERROR),
        (b, False, None),
    ]
    one.run()
    assert one.ended["b"] is FinishReason.LENGTH


def test_what_a_failed_slice_left_in_its_pages_is_found_by_nobody() -> None:
    one = prefix_engine()
    one.submit(request("a", [5] * 12))
    one.plan()
    one.commit({0: "its logits are not finite"})
    assert one.scheduler.cache.usage.cached == 0
    assert one.scheduler.cache.cached_tokens(request("b", [5] * 12)) == 0


def test_a_failed_slice_needs_no_token() -> None:
    scheduler = engine().scheduler
    scheduler.submit(request("a"))
    batch = scheduler.plan(0)
    (event,) = scheduler.commit(batch, StepOutput([None], failed={0: "broken"}), 1)
    assert event.finish_reason is FinishReason.ERROR


@pytest.mark.parametrize("chunk", [64, 16, 5])
def test_every_full_page_of_a_prompt_is_published_when_it_is_computed(chunk: int) -> None:
    one = engine(100, 4, TokenBudget(chunk, 64), PrefixCache)
    one.submit(request("a", [5] * 33))
    cached = []
    while not one.everyone["a"].output_tokens:
        one.step()
        cached.append(one.scheduler.cache.cached_tokens(request("b", [5] * 33)))
    assert cached == {64: [32], 16: [16, 32, 32], 5: [4, 8, 12, 16, 20, 24, 28, 32]}[chunk]


def test_logprobs_go_with_their_token() -> None:
    scheduler = engine().scheduler
    scheduler.submit(Request("a", (1,), SamplingParams(logprobs=1)))
    scheduler.submit(Request("b", (1,)))
    logprobs = TokenLogprobs(-0.5, ((9, -0.5),))
    events = scheduler.commit(scheduler.plan(0), StepOutput([8, 9], logprobs={1: logprobs}), 1)
    assert [(e.request.id, e.token, e.logprobs) for e in events] == [("a", 8, None), ("b", 9, logprobs)]


def test_events_come_in_the_order_in_which_they_happened() -> None:
    one = engine(max_running=1, deadlines=Deadlines(queue=1))
    one.submit(request("a", 4, max_tokens=9), request("b"), request("c", arrival=5))
    one.step()
    one.scheduler.abort(one.everyone["c"], one.now)
    one.plan()
    events = one.commit()
    assert [(e.request.id, e.finish_reason) for e in events] == [
        ("c", FinishReason.ABORT),
        ("b", FinishReason.TIMEOUT),
        ("a", None),
    ]
    assert one.scheduler.drain() == []


def test_a_chunk_in_the_middle_yields_no_token_whatever_the_step_says() -> None:
    scheduler = engine(budget=TokenBudget(4, 4)).scheduler
    a = request("a", 8)
    scheduler.submit(a)
    assert scheduler.commit(scheduler.plan(0), StepOutput([9]), 1) == []
    assert a.output_tokens == []
    (event,) = scheduler.commit(scheduler.plan(1), StepOutput([9]), 2)
    assert (event.token, a.output_tokens) == (9, [9])


def test_what_cannot_be_committed_changes_nothing() -> None:
    scheduler = engine(ahead=1).scheduler
    scheduler.submit(request("a"))
    first = scheduler.plan(0)
    with pytest.raises(ValueError, match="the step has 1 slices, and 2 tokens came of it"):
        scheduler.commit(first, StepOutput([9, 9]), 1)
    with pytest.raises(ValueError, match="gave no token for request a, which it completed"):
        scheduler.commit(first, StepOutput([None]), 1)
    second = scheduler.plan(0)
    with pytest.raises(ValueError, match="only the oldest step in flight can be committed, and only once"):
        scheduler.commit(second, StepOutput([9]), 1)
    with pytest.raises(RuntimeError, match="2 steps are in flight; commit the oldest before planning another"):
        scheduler.plan(0)
    assert len(scheduler.commit(first, StepOutput([9]), 1)) == 1
    with pytest.raises(ValueError, match="only the oldest step in flight"):
        scheduler.commit(first, StepOutput([9]), 1)
    assert len(scheduler.commit(second, StepOutput([9]), 1)) == 1
    check(scheduler)


def test_an_empty_step_is_committed_like_any_other() -> None:
    scheduler = engine().scheduler
    a = request("a")
    scheduler.submit(a)
    scheduler.abort(a, 0)
    batch = scheduler.plan(0)
    assert not batch
    assert scheduler.has_work
    assert [event.finish_reason for event in scheduler.commit(batch, StepOutput([]), 1)] == [FinishReason.ABORT]
    assert not scheduler.has_work


def test_a_step_that_raised_is_planned_again() -> None:
    one = engine(pages=9, page_size=4, ahead=1, cache=PrefixCache)
    waiting(one)
    rng = random.Random(0)
    while one.scheduler.seats:
        one.step()
        if rng.random() < 0.3:
            one.void()
            one.check()
    one.run().check_the_end()
    assert set(one.ended.values()) == {FinishReason.LENGTH}


# One step ahead.


def test_a_step_is_planned_while_the_one_before_is_on_the_device() -> None:
    one = engine(ahead=1)
    one.submit(request("a", 4, max_tokens=4))
    one.plan()
    second = one.plan()
    assert [(p.start, p.length) for p in second] == [(4, 1)]  # a token that nobody here knows yet
    assert one.everyone["a"].total == 4
    assert len(one.commit()) == 1
    assert one.everyone["a"].total == 5
    one.run().check_the_end()


def test_a_stop_is_seen_one_step_late_and_the_surplus_discarded() -> None:
    name = next(n for n in map(str, range(99)) if 2 <= len(alone(request(n, ignore_eos=False), EOS)[0]) < 5)
    slices = {}
    for ahead in (0, 1):
        one = engine(ahead=ahead)
        one.submit(request(name, ignore_eos=False))
        one.run().check_the_end()
        slices[ahead] = sum(len(batch) for batch in one.batches)
        assert one.ended[name] is FinishReason.STOP
    assert slices[1] == slices[0] + 1


def test_an_end_by_length_is_known_beforehand_and_nothing_is_planned_after_it() -> None:
    for ahead in (0, 1):
        one = engine(ahead=ahead)
        one.submit(*(request(f"r{n}", 4, max_tokens=n + 1) for n in range(4)))
        one.run().check_the_end()
        assert sum(batch.num_tokens for batch in one.batches) == sum(4 + n for n in range(4))


def leaving(one: Engine) -> Seat:
    """Who is about to be preempted, and has a token in flight."""
    waiting(one)
    while one.scheduler.residents.leaving is None:
        one.step()
        one.plan() if len(one.in_flight) < 2 else None
        if one.scheduler.residents.leaving is None:
            one.commit()
    return one.scheduler.residents.leaving


def test_one_with_tokens_in_flight_is_preempted_when_they_have_landed_and_none_is_lost() -> None:
    one = engine(pages=9, page_size=4, ahead=1)
    seat = leaving(one)
    said = len(seat.request.output_tokens)
    assert (seat.request.state, seat.in_flight) == (RequestState.RUNNING, 1)
    while one.in_flight:
        one.commit()
    assert (seat.request.state, len(seat.request.output_tokens)) == (RequestState.PREEMPTED, said + 1)
    one.run().check_the_end()


def test_one_that_was_about_to_be_preempted_is_when_what_is_in_flight_is_lost() -> None:
    one = engine(pages=9, page_size=4, ahead=1)
    seat = leaving(one)
    one.void()
    assert seat.request.state is RequestState.PREEMPTED
    one.run().check_the_end()
    assert set(one.ended.values()) == {FinishReason.LENGTH}


# What is not allowed, and what a check finds.


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_running": 0}, "max_running must be an integer from 1, got 0"),
        ({"max_running": True}, "max_running must be an integer from 1, got True"),
        ({"queue_limit": 0}, "queue_limit must be an integer from 1, got 0"),
        ({"watermark": 1}, "watermark must be a share of the pool, from 0 to below 1, got 1"),
        ({"watermark": "5%"}, "watermark must be a share of the pool, .* got '5%'"),
        ({"ahead": 2}, "ahead must be 0 or 1 steps, got 2"),
    ],
)
def test_what_cannot_be_a_scheduler(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        engine(**options)


@pytest.mark.parametrize(
    ("breakage", "message"),
    [
        (lambda s: s.admission.waiting.add(s.residents.running.last), "r is running among the waiting"),
        (lambda s: s.residents.running.remove(s.residents.running.last), "not of the same requests"),
        (lambda s: setattr(s.residents.running.last, "planned", 3), "computed 4, planned 3, known 5"),
        (lambda s: setattr(s.residents.running.last, "room", 16), "room 16"),
        (lambda s: setattr(s.residents, "landing", 1), "1 are said to land, and 0 do"),
        (lambda s: setattr(s.residents.running.last, "stays", False), "both leaves and stays, or neither"),
        (lambda s: setattr(s.admission, "max_running", 0), "1 are running"),
    ],
)
def test_check_finds_what_is_wrong(breakage: Callable[[Scheduler], object], message: str) -> None:
    one = engine()
    one.submit(request("r"))
    one.step()
    check(one.scheduler)
    breakage(one.scheduler)
    with pytest.raises(SchedulerError, match=message):
        check(one.scheduler)

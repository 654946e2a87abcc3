"""Steps: their events, what may be committed, and running one step ahead."""

import pytest

from phase0_request import FinishReason, Request, SamplingParams, StepOutput, TokenLogprobs
from phase2_prefill_decode.extras.outcome import SliceOutcome
from phase5_continuous.extras.fairness import FairQueues
from phase5_continuous.extras.invariants import check
from tests.phase5_continuous.moments import engine, names
from tests.phase5_continuous.support import EOS, Later, alone, request, share_of

# The events of a step.


def test_a_blocked_request_has_no_slice_and_the_others_go_on() -> None:
    one = engine()
    one.submit(request("a"), request("b"))
    one.step()
    next(iter(one.scheduler.running_set.running)).block(Later(one, one.steps + 3))
    assert names(one.step()) == ["b"], "a waits for an extra (`blocked_by`): of a and b, b alone has a slice"
    one.run().check_the_end()


def test_a_failed_slice_ends_only_its_request() -> None:
    one = engine()
    one.submit(request("a"), request("b"))
    one.plan()
    events = one.commit({0: "its logits are not finite"})
    a, b = one.requests["a"], one.requests["b"]
    assert (a.finish_reason, a.error) == (FinishReason.ERROR, "its logits are not finite")
    assert [(e.request, e.token is None, e.finish_reason) for e in events] == [
        (a, True, FinishReason.ERROR),
        (b, False, None),
    ]
    one.run()
    assert one.ended["b"] is FinishReason.LENGTH


def test_a_failed_slice_needs_no_token() -> None:
    scheduler = engine().scheduler
    scheduler.submit(request("a"))
    batch = scheduler.plan(0)
    (event,) = scheduler.commit(batch, StepOutput([None], failed={0: "broken"}), 1)
    assert event.finish_reason is FinishReason.ERROR


def test_a_request_that_has_finished_needs_no_token() -> None:
    one = engine(ahead=1)
    one.submit(request("a"))
    batch = one.scheduler.plan(0)
    one.scheduler.finish(one.requests["a"], FinishReason.ABORT, 0)
    (event,) = one.scheduler.commit(batch, StepOutput([None]), 1)
    assert event.finish_reason is FinishReason.ABORT, "the step of an aborted request is committed without its token"


def test_an_event_has_the_logprobs_of_its_token() -> None:
    scheduler = engine().scheduler
    scheduler.submit(Request("a", (1,), SamplingParams(logprobs=1)))
    scheduler.submit(Request("b", (1,)))
    logprobs = TokenLogprobs(-0.5, ((9, -0.5),))
    events = scheduler.commit(scheduler.plan(0), StepOutput([8, 9], more={1: SliceOutcome(9, logprobs)}), 1)
    assert [(e.request.id, e.token, e.more) for e in events] == [("a", 8, None), ("b", 9, logprobs)]


def test_every_token_of_a_prompt_and_an_answer_counts_for_its_tenant() -> None:
    one = engine(turns=FairQueues)
    one.submit(request("a", 8, max_tokens=5, tenant="t"), request("b", 4, max_tokens=5, tenant="u"))
    for step in range(1, 4):
        one.step()
        served = dict(share_of(one.scheduler).served)
        assert served == {"t": 8 + step, "u": 4 + step}, f"tokens of each tenant after {step} steps"


def test_events_are_in_the_order_in_which_they_happened() -> None:
    one = engine(max_running=1)
    one.submit(request("a", 4, max_tokens=9))
    one.submit(request("b"), request("c", arrival=5), timeout=1)
    one.step()
    one.scheduler.finish(one.requests["c"], FinishReason.ABORT, one.now)
    one.plan()
    events = one.commit()
    assert [(e.request.id, e.finish_reason) for e in events] == [
        ("c", FinishReason.ABORT),
        ("b", FinishReason.TIMEOUT),
        ("a", None),
    ]
    assert one.scheduler.drain() == []


def test_a_refused_commit_changes_nothing() -> None:
    scheduler = engine(ahead=1).scheduler
    scheduler.submit(request("a"))
    first = scheduler.plan(0)
    with pytest.raises(ValueError, match="the step has 1 slices, but the output holds 2 tokens"):
        scheduler.commit(first, StepOutput([9, 9]), 1)
    with pytest.raises(ValueError, match="gave no token for request a, which it completed"):
        scheduler.commit(first, StepOutput([None]), 1)
    assert len(scheduler.commit(first, StepOutput([9]), 1)) == 1
    check(scheduler)


def test_an_empty_step_is_committed_like_any_other() -> None:
    scheduler = engine().scheduler
    a = request("a")
    scheduler.submit(a)
    scheduler.finish(a, FinishReason.ABORT, 0)
    batch = scheduler.plan(0)
    assert not batch
    assert scheduler.has_work
    assert [event.finish_reason for event in scheduler.commit(batch, StepOutput([]), 1)] == [FinishReason.ABORT]
    assert not scheduler.has_work


# One step ahead.


def test_a_stop_is_seen_one_step_late_and_the_surplus_token_is_discarded() -> None:
    name = next(n for n in map(str, range(99)) if 2 <= len(alone(request(n, ignore_eos=False), EOS)[0]) < 5)
    slices = {}
    for ahead in (0, 1):
        one = engine(ahead=ahead)
        one.submit(request(name, ignore_eos=False))
        one.run().check_the_end()
        slices[ahead] = sum(len(batch) for batch in one.batches)
        assert one.ended[name] is FinishReason.STOP
    assert slices[1] == slices[0] + 1


def test_no_slice_is_planned_after_an_end_by_length() -> None:
    for ahead in (0, 1):
        one = engine(ahead=ahead)
        one.submit(*(request(f"r{n}", 4, max_tokens=n + 1) for n in range(4)))
        one.run().check_the_end()
        assert sum(batch.num_tokens for batch in one.batches) == sum(4 + n for n in range(4))

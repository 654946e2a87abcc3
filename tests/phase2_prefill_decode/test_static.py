from unittest.mock import Mock

import pytest

from phase0_request import FinishReason, Request, StepOutput
from phase0_request.queue import QueueFullError
from phase1_kv_pool import PagedCache
from phase2_prefill_decode.scheduler import StaticScheduler
from tests.phase5_continuous.support import request


def test_the_result_of_a_slice_is_discarded_if_its_request_has_ended_meanwhile() -> None:
    cache = PagedCache(20, 4)
    static = StaticScheduler(cache)
    a, b = request("a"), request("b")
    static.submit(a)
    static.submit(b)
    batch = static.plan(0)
    assert static.finish(a, FinishReason.ABORT, 1)
    events = static.commit(batch, StepOutput([7, 8]), 2)
    assert [(event.request.id, event.token) for event in events] == [("a", None), ("b", 8)]
    assert (a.output_tokens, b.output_tokens) == ([], [8])
    assert [piece.request for piece in static.plan(3)] == [b]


def test_a_request_that_ended_as_an_interrupt_came_is_released_and_its_end_delivered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for running in (True, False):
        scheduler, ended = StaticScheduler(PagedCache(20, 4)), request("a")
        scheduler.submit(ended)
        if running:
            scheduler.plan(0)
        with monkeypatch.context() as patch:
            patch.setattr(scheduler, "_remove", Mock(side_effect=KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                scheduler.finish(ended, FinishReason.ABORT, 1)
        scheduler.discard_in_flight()
        assert [(event.token, event.finish_reason) for event in scheduler.drain()] == [(None, FinishReason.ABORT)]
        assert (scheduler.has_work, scheduler.pages_used, len(scheduler.plan(2))) == (False, 0, 0)


def test_pages_are_reserved_to_the_end_and_no_request_is_admitted_before_the_batch_has_ended() -> None:
    scheduler = StaticScheduler(PagedCache(8, 4), batch_size=3)
    requests = [request(f"r{n}", 4, max_tokens=9) for n in range(4)]
    for one in requests:
        scheduler.submit(one)
    assert len(scheduler.plan(0.0)) == 2  # of three pages each, in eight
    assert scheduler.cache.usage.referenced == 6
    assert scheduler.finish(requests[0], FinishReason.ABORT, 0.0)
    assert scheduler.finish(requests[2], FinishReason.ABORT, 0.0)
    assert not scheduler.finish(requests[0], FinishReason.ABORT, 0.0)
    assert len(scheduler.plan(0.0)) == 1
    assert [event.request.id for event in scheduler.drain()] == ["r0", "r2"]
    assert scheduler.has_work


def test_a_request_that_could_outgrow_the_cache_is_refused() -> None:
    scheduler = StaticScheduler(PagedCache(8, 4))
    with pytest.raises(ValueError, match="may grow to 35 tokens, and the pool has room for 32"):
        scheduler.submit(request("r", 4, max_tokens=32))
    with pytest.raises(ValueError, match="batch_size must be an integer from 1, got 0"):
        StaticScheduler(PagedCache(8, 4), batch_size=0)


def test_a_request_that_an_interrupt_took_out_of_the_batch_waits_again_also_in_a_full_queue(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scheduler = StaticScheduler(PagedCache(32, 4), batch_size=1, queue_limit=1)
    running, waiting = request("a"), request("b")
    scheduler.submit(running)
    batch = scheduler.plan(0)
    scheduler.submit(waiting)
    with monkeypatch.context() as patch:
        patch.setattr(Request, "append", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            scheduler.commit(batch, StepOutput([7]), 1)
    scheduler.discard_in_flight()
    assert [part.request for part in scheduler.plan(2)] == [running]
    with pytest.raises(QueueFullError):
        scheduler.submit(request("c"))

"""Requests ended from outside: by aborts, stop strings and deadlines, in every state."""

import math
import weakref
from collections.abc import Callable
from typing import Any

import pytest

from phase0_request import FinishReason
from phase1_kv_pool import PagedCache
from phase4_radix.prefix_cache import PrefixCache
from tests.phase5_continuous.moments import engine, in_flight, preempted, running, waiting
from tests.phase5_continuous.support import Engine, preempted_of, request


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("moment", [waiting, running, in_flight, preempted])
@pytest.mark.parametrize("cache", [PagedCache, PrefixCache])
def test_an_abort_in_any_state_ends_that_request_and_no_other(
    moment: Callable[[Engine], None], ahead: int, cache: type[PagedCache]
) -> None:
    one = engine(pages=9, cache=cache, ahead=ahead)
    moment(one)
    r = one.requests["r"]
    delivered = len(one.delivered["r"])
    assert one.scheduler.finish(r, FinishReason.ABORT, 99)
    assert not one.scheduler.finish(r, FinishReason.ABORT, 100)
    assert (r.finish_reason, r.times.finished) == (FinishReason.ABORT, 99)
    one.check()
    while one.in_flight:
        one.commit()
    one.run().check_the_end()
    assert len(one.delivered["r"]) == delivered  # no token of it after the end
    assert one.ended == {"other": FinishReason.LENGTH, "r": FinishReason.ABORT}


def test_pages_in_flight_are_freed_when_the_step_is_committed() -> None:
    one = engine(pages=9)
    in_flight(one)
    used = one.scheduler.cache.usage.referenced
    one.scheduler.finish(one.requests["r"], FinishReason.ABORT, one.now)
    assert one.scheduler.cache.usage.referenced == used
    with pytest.raises(ValueError, match="r is here already; ids are unique until their request has left"):
        one.submit(request("r"))
    one.commit()
    assert one.scheduler.cache.usage.referenced == used - 3
    one.submit(request("r"))


def test_a_request_may_be_ended_with_another_reason_than_abort() -> None:
    one = engine()
    running(one)
    assert not one.scheduler.finish(request("r"), FinishReason.ABORT, one.now)  # another request of the same name
    assert one.scheduler.finish(one.requests["r"], FinishReason.STOP, one.now)  # a stop string in its text
    assert one.scheduler.finish(one.requests["other"], FinishReason.ERROR, one.now, "its text is broken")
    assert not one.scheduler.finish(request("stranger"), FinishReason.ABORT, one.now)
    one.run()
    assert one.ended == {"r": FinishReason.STOP, "other": FinishReason.ERROR}


def test_a_stop_string_may_end_a_request_that_was_preempted_since() -> None:
    one = engine(pages=9)
    preempted(one)
    (request,) = preempted_of(one.scheduler)
    assert one.scheduler.finish(request, FinishReason.STOP, one.now)
    one.run()
    assert one.ended == {"other": FinishReason.LENGTH, "r": FinishReason.STOP}


def test_deadlines_end_requests_that_wait_or_run_too_long() -> None:
    one = engine(max_running=1)
    one.submit(request("runs", 4, max_tokens=14), timeout=10)
    one.submit(request("waits"), timeout=3)
    one.submit(request("patient", 4, max_tokens=14))
    one.run()
    ends = {name: (r.finish_reason, r.times.finished, len(r.output_tokens)) for name, r in one.requests.items()}
    assert ends == {
        "runs": (FinishReason.TIMEOUT, 10, 10),
        "waits": (FinishReason.TIMEOUT, 3, 0),
        "patient": (FinishReason.LENGTH, 23, 14),
    }
    assert one.ended == {name: end[0] for name, end in ends.items()}


@pytest.mark.parametrize("timeout", [0, -1, math.inf, math.nan, True, "5", 10**400])
def test_a_timeout_that_is_no_positive_number_is_refused(timeout: Any) -> None:
    one = engine()
    with pytest.raises(ValueError, match="request r: timeout must be a number above 0, got "):
        one.core.submit(request("r"), timeout)
    assert not one.scheduler.has_work


def test_a_deadline_keeps_no_request_that_has_ended() -> None:
    """A prompt may be a million tokens, and its deadline an hour away."""
    one = engine()
    ended = request("r")
    one.core.submit(ended, timeout=3600)
    one.core.abort(ended)
    one.scheduler.drain()
    still_there = weakref.ref(ended)
    del ended
    assert still_there() is None
    one.now = 3601
    assert one.core.step() is None


def test_a_deadline_that_passes_in_flight_ends_the_request_at_once_and_frees_its_pages_later() -> None:
    one = engine(ahead=1)
    one.submit(request("r", 4, max_tokens=30), timeout=2.5)
    for _ in range(4):
        one.step()
    r = one.requests["r"]
    assert (r.finish_reason, r.times.finished) == (FinishReason.TIMEOUT, 3)
    one.run()
    assert one.delivered["r"] == r.output_tokens
    assert one.ended["r"] is FinishReason.TIMEOUT
    assert one.scheduler.cache.usage.referenced == 0

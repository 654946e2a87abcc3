"""Requests ended from outside: by aborts, stop strings and deadlines, in every state."""

import math
import weakref
from typing import Any

import pytest

from phase0_request import FinishReason
from tests.phase5_continuous.moments import engine, in_flight, preempted, running
from tests.phase5_continuous.support import preempted_of, request


def test_pages_in_flight_are_freed_when_the_step_is_committed() -> None:
    one = engine(pages=9)
    in_flight(one)
    used = one.scheduler.cache.usage.referenced
    one.scheduler.finish(one.requests["r"], FinishReason.ABORT, one.now)
    held = one.scheduler.cache.usage.referenced
    assert held == used, f"a slice of r is on the device, and {used - held} of its pages are free"
    with pytest.raises(ValueError, match="r is here already; ids are unique until their request has left"):
        one.submit(request("r"))
    one.commit()
    held = one.scheduler.cache.usage.referenced
    assert held == used - 3, f"r held 3 pages, its last slice is committed, and {used - held} are free"
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

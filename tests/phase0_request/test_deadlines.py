import heapq
import math
import random

import pytest

from phase0_request import FinishReason, Request
from phase0_request.core import Deadlines


def test_requests_are_due_in_order_and_once_unless_they_have_ended() -> None:
    deadlines = Deadlines()
    late, soon, ends, last = requests = [Request(f"r{n}", (1,)) for n in range(4)]
    for request, deadline in zip(requests, [5, 3, 4, 9], strict=True):
        deadlines.add(request, deadline)
    assert list(deadlines.due(2.9)) == []
    assert list(deadlines.due(3)) == [soon]
    ends.finish(FinishReason.ABORT, 3.5)
    assert list(deadlines.due(8)) == [late]
    assert list(deadlines.due(99)) == [last]
    assert list(deadlines.due(math.inf)) == []


def test_deadlines_of_finished_requests_do_not_pile_up() -> None:
    deadlines, rng = Deadlines(), random.Random(0)
    live: list[Request] = []
    for number in range(5000):
        live.append(Request(f"r{number}", (1,)))
        deadlines.add(live[-1], 1e6)
        if len(live) > 20:
            live.pop(rng.randrange(20)).finish(FinishReason.ABORT, 0)
        assert len(deadlines) <= 2 * 64
    assert {*deadlines.due(1e6)} == {*live}


def test_deadlines_of_many_live_requests_are_not_swept_at_each_submission(monkeypatch: pytest.MonkeyPatch) -> None:
    sweeps: list[object] = []
    monkeypatch.setattr(heapq, "heapify", sweeps.append)  # all requests are live, so the heap stays in order
    deadlines = Deadlines()
    for number in range(5000):
        deadlines.add(Request(f"r{number}", (1,)), 1e6)
    assert 1 <= len(sweeps) <= 10
    assert len(deadlines) == 5000

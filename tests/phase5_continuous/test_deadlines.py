import heapq
import math
import random

import pytest

from phase0_request import FinishReason
from phase5_continuous.deadlines import Deadlines
from phase5_continuous.running import SequenceState
from tests.phase5_continuous.support import request


def state(name: str, number: int = 0) -> SequenceState:
    one = request(name)
    return SequenceState(one, (0.0, number), one.total, one.total + 5)


def test_requests_are_due_in_order_and_once_unless_they_have_ended() -> None:
    deadlines = Deadlines()
    late, soon, ends, last = states = [state(f"s{n}", number=n) for n in range(4)]
    for one, timeout in zip(states, [5, 3, 4, 9], strict=True):
        deadlines.set(one, timeout)
    assert list(deadlines.due(2.9)) == []
    assert list(deadlines.due(3)) == [soon]
    ends.request.finish(FinishReason.ABORT, 3.5)
    assert list(deadlines.due(8)) == [late]
    assert list(deadlines.due(99)) == [last]
    assert list(deadlines.due(math.inf)) == []


def test_deadlines_of_finished_requests_do_not_pile_up() -> None:
    deadlines, rng = Deadlines(), random.Random(0)
    live: list[SequenceState] = []
    for number in range(5000):
        one = state(f"s{number}", number=number)
        deadlines.set(one, 1e6)
        live.append(one)
        if len(live) > 20:
            live.pop(rng.randrange(20)).request.finish(FinishReason.ABORT, 0)
        assert len(deadlines) <= 2 * 64
    assert sorted(one.request.id for one in deadlines.due(1e6)) == sorted(one.request.id for one in live)


def test_deadlines_of_many_live_requests_are_not_swept_at_each_submission(monkeypatch: pytest.MonkeyPatch) -> None:
    sweeps: list[object] = []
    monkeypatch.setattr(heapq, "heapify", sweeps.append)  # all requests are live, so the heap stays in order
    deadlines = Deadlines()
    for number in range(5000):
        deadlines.set(state(f"s{number}", number=number), 1e6)
    assert 1 <= len(sweeps) <= 10
    assert len(deadlines) == 5000

import heapq
import math
import random

import pytest

from phase0_request import FinishReason
from phase5_continuous.deadlines import Alarms, Deadlines
from phase5_continuous.running import SequenceState
from tests.phase5_continuous.support import request


def state(name: str, number: int = 0) -> SequenceState:
    one = request(name)
    return SequenceState(one, (0.0, number), one.total, one.total + 5)


def test_alarms_are_due_in_order_and_once() -> None:
    alarms = Alarms()
    states = [state(f"s{n}", number=n) for n in range(4)]
    for one, deadlines in zip(states, [Deadlines(5), Deadlines(total=3), Deadlines(4, 9), Deadlines()], strict=True):
        alarms.set(one, deadlines)
    assert list(alarms.due(2.9)) == []
    assert list(alarms.due(3)) == [states[1]]
    states[2].request.admit(3.5)
    assert list(alarms.due(8)) == [states[0]]
    assert list(alarms.due(99)) == [states[2]]
    assert list(alarms.due(math.inf)) == []


def test_a_request_whose_two_deadlines_pass_together_is_due_once() -> None:
    alarms = Alarms()
    both = state("both")
    alarms.set(both, Deadlines(2, 2))
    due = []
    for one in alarms.due(2):
        one.request.finish(FinishReason.TIMEOUT, 2)
        due.append(one)
    assert due == [both]


def test_alarms_of_finished_requests_do_not_pile_up() -> None:
    alarms, rng = Alarms(), random.Random(0)
    live: list[SequenceState] = []
    for number in range(5000):
        one = state(f"s{number}", number=number)
        alarms.set(one, Deadlines(total=1e6))
        live.append(one)
        if len(live) > 20:
            live.pop(rng.randrange(20)).request.finish(FinishReason.ABORT, 0)
        assert len(alarms) <= 2 * 64
    assert sorted(one.request.id for one in alarms.due(1e6)) == sorted(one.request.id for one in live)


def test_alarms_of_many_live_requests_are_not_swept_at_each_submission(monkeypatch: pytest.MonkeyPatch) -> None:
    sweeps: list[object] = []
    monkeypatch.setattr(heapq, "heapify", sweeps.append)  # all requests are live, so the heap stays in order
    alarms = Alarms()
    for number in range(5000):
        alarms.set(state(f"s{number}", number=number), Deadlines(total=1e6))
    assert 1 <= len(sweeps) <= 10
    assert len(alarms) == 5000


@pytest.mark.parametrize("value", [0, -1, math.inf, math.nan, True, "5"])
@pytest.mark.parametrize("name", ["queue", "total"])
def test_a_deadline_that_is_no_positive_number_is_refused(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"the {name} deadline must be a finite number of seconds above 0, or None"):
        Deadlines(**{name: value})  # type: ignore[arg-type]

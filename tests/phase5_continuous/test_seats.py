import heapq
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phase0_request import FinishReason
from phase5_continuous.deadlines import Alarms, Deadlines
from phase5_continuous.seat import Line, Seat
from tests.phase5_continuous.support import request


def seat(name: str, rank: float = 0.0, number: int = 0) -> Seat:
    one = request(name)
    return Seat(one, (rank, number), one.total, one.total + 5)


@given(st.lists(st.tuples(st.sampled_from(["add", "first", "any"]), st.integers(0, 5), st.integers(0, 1000))))
def test_a_line_is_a_sorted_list(actions: list[tuple[str, int, int]]) -> None:
    line, model = Line(), list[Seat]()
    for number, (action, rank, place) in enumerate(actions):
        if action == "add":
            model.append(seat(f"s{number}", rank, number))
            model.sort(key=lambda one: one.key)
            line.add(next(one for one in model if one.key[1] == number))
        elif model:
            line.remove(model.pop(0 if action == "first" else place % len(model)))
        assert list(line) == model
        assert len(line) == len(model)
        assert line.first(3) == model[:3]
        assert not model or line.last is model[-1]


def test_a_line_forgets_those_who_have_left_its_front() -> None:
    line = Line()
    for number in range(3000):
        line.add(seat(f"s{number}", number, number))
        if number >= 10:
            line.remove(line.first(1)[0])
        assert len(line._seats) <= 2 * len(line) + 1


def test_who_is_not_in_a_line_cannot_leave_it() -> None:
    line = Line()
    line.add(seat("a", 1, 1))
    for stranger in (seat("b", 0, 0), seat("c", 1, 1), seat("d", 2, 2)):
        with pytest.raises(ValueError, match=f"request {stranger.request.id} is not in this line"):
            line.remove(stranger)


def test_alarms_ring_in_order_and_once() -> None:
    alarms = Alarms()
    seats = [seat(f"s{n}", number=n) for n in range(4)]
    for one, deadlines in zip(seats, [Deadlines(5), Deadlines(total=3), Deadlines(4, 9), Deadlines()], strict=True):
        alarms.set(one, deadlines)
    assert list(alarms.due(2.9)) == []
    assert list(alarms.due(3)) == [seats[1]]
    seats[2].request.admit(3.5)
    assert list(alarms.due(8)) == [seats[0]]
    assert list(alarms.due(99)) == [seats[2]]
    assert list(alarms.due(math.inf)) == []


def test_one_whose_two_alarms_ring_together_rings_once() -> None:
    alarms = Alarms()
    both = seat("both")
    alarms.set(both, Deadlines(2, 2))
    rung = []
    for one in alarms.due(2):
        one.request.finish(FinishReason.TIMEOUT, 2)
        rung.append(one)
    assert rung == [both]


def test_alarms_of_those_who_have_left_do_not_pile_up() -> None:
    alarms, rng = Alarms(), random.Random(0)
    live: list[Seat] = []
    for number in range(5000):
        one = seat(f"s{number}", number=number)
        alarms.set(one, Deadlines(total=1e6))
        live.append(one)
        if len(live) > 20:
            live.pop(rng.randrange(20)).request.finish(FinishReason.ABORT, 0)
        assert len(alarms) <= 2 * 64
    assert sorted(one.request.id for one in alarms.due(1e6)) == sorted(one.request.id for one in live)


def test_alarms_of_many_who_stay_are_not_looked_through_for_each_that_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    sweeps: list[object] = []
    monkeypatch.setattr(heapq, "heapify", sweeps.append)  # all stay, so what is left is in order as it was
    alarms = Alarms()
    for number in range(5000):
        alarms.set(seat(f"s{number}", number=number), Deadlines(total=1e6))
    assert 1 <= len(sweeps) <= 10
    assert len(alarms) == 5000


@pytest.mark.parametrize("value", [0, -1, math.inf, math.nan, True, "5"])
@pytest.mark.parametrize("name", ["queue", "total"])
def test_what_cannot_be_a_deadline(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"the {name} deadline must be a finite number of seconds above 0, or None"):
        Deadlines(**{name: value})  # type: ignore[arg-type]

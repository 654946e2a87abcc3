from dataclasses import replace

import pytest

from phase2_prefill_decode.lab.cost import Load
from phase2_prefill_decode.lab.roofline import DEVICES
from phase5_continuous.lab.simulator import Setting, Simulation, simulate
from phase5_continuous.lab.traces import Arrival, Trace

SMALL = Setting(model="17m", device=DEVICES["L4"], pages=256, max_running=32, chunk=64, budget=128, max_tokens=64)
TRACE = Trace(requests=120, rate=4000.0, prompt=40, answer=12, max_prompt=400, max_answer=64)


class Second:
    """A machine on which every step takes a second, whatever is in it."""

    def load(self, pieces: object, yields: int) -> Load:
        return Load(1, 0, 0, yields)

    def seconds(self, load: Load) -> float:
        return 1.0


def at(time: float, prompt: int, answer: int, name: int) -> Arrival:
    return Arrival(time, (name, *(1,) * (prompt - 1)), answer)


def tokens_at(arrivals: list[Arrival], setting: Setting) -> dict[str, list[float]]:
    """The times of each request's tokens, if a step takes a second."""
    simulation, times = Simulation(arrivals, setting), dict[str, list[float]]()
    simulation.runner.times = Second()  # type: ignore[assignment]
    while simulation.going:
        step = simulation.step()
        times |= {event.request.id: event.request.times.tokens for event in (step.events if step else ())}
    return times


@pytest.mark.parametrize(
    ("way", "times"),
    [
        # r0 runs alone until it has ended; r1 and r2 arrive meanwhile and are the next batch.
        ("static", {"r0": [1, 2, 3, 4], "r1": [5, 6], "r2": [5, 6, 7]}),
        # r1 is admitted in the second step, r2 when a place is free: in the fourth.
        ("whole", {"r0": [1, 2, 3, 4], "r1": [2, 3], "r2": [4, 5, 6]}),
        # r0 in chunks of 4 and 2; r1, beside it, of 4, 4 and 2; r2 is admitted when r1 has ended, in the sixth step.
        ("fcfs", {"r0": [2, 3, 4, 5], "r1": [4, 5], "r2": [6, 7, 8]}),
    ],
)
def test_schedules_are_those_made_by_hand(way: str, times: dict[str, list[float]]) -> None:
    """Prompt and output tokens: r0 6 and 4, r1 (at 0.5 s) 10 and 2, r2 (at 1.5 s) 2 and 3. Two may run; a step takes
    a second."""
    arrivals = [at(0, 6, 4, 7), at(0.5, 10, 2, 8), at(1.5, 2, 3, 9)]
    setting = Setting(pages=32, page_size=4, max_running=2, chunk=4, budget=8, prefix_cache=False, max_tokens=8)
    assert tokens_at(arrivals, replace(setting, way=way)) == times


def test_a_prefix_cache_saves_most_of_a_chats_prefill() -> None:
    chat = replace(TRACE, kind="chat", rate=50.0)
    shared, plain = (simulate(chat.arrivals(), replace(SMALL, pages=4096, prefix_cache=on)) for on in (True, False))
    assert plain.prefill_tokens == plain.prompt_tokens == shared.prompt_tokens
    assert shared.prefill_tokens < 0.4 * plain.prefill_tokens

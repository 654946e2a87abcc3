"""The load generator: the requests that it sends, and their times."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from phase6_integration.load.client import send_all
from phase6_integration.load.response import Outcome
from phase6_integration.load.workload import FIRST, LAST, Workload
from tests.phase6_integration.load.load_parts import Clock

# The requests.


def test_a_seed_determines_prompts_and_times() -> None:
    for kind in ("fixed", "long-tail", "shared-prefix"):
        one = Workload(kind=kind, num_prompts=20, request_rate=5, seed=3)
        assert list(one.works()) == list(one.works())
        assert list(one.works()) != list(replace(one, seed=4).works())


def test_without_a_seed_each_run_has_other_prompts() -> None:
    """A second run against one server would measure what that has kept of the first."""
    first, second = (Workload(num_prompts=1) for _ in range(2))
    assert first.seed != second.seed
    assert [work.prompt for work in first.works()] != [work.prompt for work in second.works()]


def test_fixed_lengths_are_exact() -> None:
    works = list(Workload(num_prompts=50, input_len=37, output_len=11).works())
    assert {(work.time, len(work.prompt), work.max_tokens) for work in works} == {(0.0, 37, 11)}
    tokens = {token for work in works for token in work.prompt}
    assert min(tokens) >= FIRST
    assert max(tokens) <= LAST
    assert len(tokens) > 1000


def test_long_tail_lengths_are_log_normal_around_the_median_up_to_the_maximum() -> None:
    works = list(
        Workload(kind="long-tail", num_prompts=2000, input_len=100, output_len=20, max_input_len=900, seed=0).works()
    )
    lengths = [len(work.prompt) for work in works]
    assert 90 < float(np.median(lengths)) < 110
    assert 700 < max(lengths) <= 900
    assert 0.9 < float(np.std(np.log([length for length in lengths if length < 900]))) < 1.05
    assert 18 <= float(np.median([work.max_tokens for work in works])) <= 22


def test_prompts_take_turns_with_the_shared_prefixes() -> None:
    works = list(
        Workload(kind="shared-prefix", num_prompts=9, prefix_len=64, num_prefixes=3, input_len=16, seed=0).works()
    )
    prefixes = [tuple(work.prompt[:64]) for work in works]
    assert prefixes[:3] == prefixes[3:6] == prefixes[6:]
    assert len(set(prefixes)) == 3
    assert len({tuple(work.prompt[64:]) for work in works}) == 9
    assert {len(work.prompt) for work in works} == {80}


def test_arrivals_are_poisson() -> None:
    works = list(Workload(num_prompts=4000, request_rate=20, input_len=1, seed=0).works())
    gaps = np.diff([work.time for work in works])
    assert abs(gaps.mean() * 20 - 1) < 0.05
    assert abs(gaps.std() / gaps.mean() - 1) < 0.06  # as an exponential has


# Their times.


class Sleeper:
    """A simulated clock: when all tasks sleep, it moves to the first that wakes."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.asleep: list[tuple[float, asyncio.Future[None]]] = []

    async def sleep(self, seconds: float) -> None:
        future = asyncio.get_running_loop().create_future()
        self.asleep.append((self.clock.now + seconds, future))
        await future

    async def pass_time(self, until: asyncio.Future[list[Outcome]]) -> list[Outcome]:
        while not until.done():
            for _ in range(5):
                await asyncio.sleep(0)
            if self.asleep:
                first = min(self.asleep, key=lambda one: one[0])
                self.asleep.remove(first)
                self.clock.now = first[0]
                first[1].set_result(None)
        return until.result()


def paced(times: Sequence[float], service: float, concurrency: int | None) -> list[Outcome]:
    """Send requests that take `service` seconds each, in simulated time."""

    async def play() -> list[Outcome]:
        sleeper = Sleeper()

        async def ask(written: bytes) -> Outcome:
            sent = sleeper.clock.now
            await sleeper.sleep(service)
            return Outcome(sent, sleeper.clock.now)

        requests = [(time, b"") for time in times]
        task = asyncio.ensure_future(send_all(requests, ask, concurrency, sleeper.clock, sleeper.sleep))
        return await sleeper.pass_time(task)

    return asyncio.run(play())


def test_an_open_loop_sends_every_request_at_its_time() -> None:
    times = [0.0, 0.5, 0.6, 7.0]
    assert [one.sent - 100 for one in paced(times, 3.0, None)] == pytest.approx(times)


def test_a_closed_loop_keeps_to_the_concurrency() -> None:
    assert [one.sent - 100 for one in paced([0.0] * 5, 3.0, 2)] == [0, 0, 3, 3, 6]


def test_limited_concurrency_delays_only_requests_that_come_too_fast() -> None:
    assert [one.sent - 100 for one in paced([0.0, 1.0, 20.0], 3.0, 1)] == pytest.approx([0, 3, 20])

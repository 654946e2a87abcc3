"""The load generator: the requests that it sends, and their times."""

import asyncio
import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from phase6_integration.load.client import Requests, Script, send_all
from phase6_integration.load.response import Outcome
from phase6_integration.load.session import FIRST, LAST, Turn
from phase6_integration.load.workload import Workload
from tests.phase6_integration.load.load_parts import Clock

# The requests.


def turns(workload: Workload) -> list[Turn]:
    return [turn for session in workload.sessions() for turn in session.turns]


def test_a_seed_determines_prompts_and_times() -> None:
    for kind in ({}, {"spread": 1.0}, {"prefix_len": 8}, {"turns": 3, "pause": 2.0}):
        one = Workload(num_prompts=20, request_rate=5, seed=3, **kind)  # type: ignore[arg-type]
        assert one.sessions() == one.sessions()
        assert one.sessions() != replace(one, seed=4).sessions()


def test_without_a_seed_each_run_has_other_prompts() -> None:
    """A second run against one server would measure what that has kept of the first."""
    first, second = (Workload(num_prompts=1) for _ in range(2))
    assert first.seed != second.seed
    assert turns(first) != turns(second)


def test_fixed_lengths_are_exact() -> None:
    made = turns(Workload(num_prompts=50, input_len=37, output_len=11))
    assert {(len(turn.prompt), turn.max_tokens) for turn in made} == {(37, 11)}
    tokens = {token for turn in made for token in turn.prompt if isinstance(token, int)}
    assert min(tokens) >= FIRST
    assert max(tokens) <= LAST
    assert len(tokens) > 1000


def test_drawn_lengths_are_log_normal_around_the_median_up_to_the_maximum() -> None:
    made = turns(Workload(spread=1.0, num_prompts=2000, input_len=100, output_len=20, max_input_len=900, seed=0))
    lengths = [len(turn.prompt) for turn in made]
    assert 90 < float(np.median(lengths)) < 110
    assert 700 < max(lengths) <= 900
    assert 0.9 < float(np.std(np.log([length for length in lengths if length < 900]))) < 1.05
    assert 18 <= float(np.median([turn.max_tokens for turn in made])) <= 22


def test_sessions_take_turns_with_the_shared_prefixes_and_only_their_first_prompt_has_one() -> None:
    made = Workload(num_prompts=9, prefix_len=64, num_prefixes=3, input_len=16, turns=2, pause=4.0, seed=0).sessions()
    prefixes = [tuple(session.turns[0].prompt[:64]) for session in made]
    assert prefixes[:3] == prefixes[3:6] == prefixes[6:]
    assert len(set(prefixes)) == 3
    assert len({tuple(session.turns[0].prompt[64:]) for session in made}) == 9
    assert {tuple(len(turn.prompt) for turn in session.turns) for session in made} == {(80, 16)}
    assert {session.turns[0].pause for session in made} == {0.0}
    assert len({session.turns[1].pause for session in made}) == 9


@pytest.mark.parametrize("shape", [0.25, 1.0, 4.0])
def test_arrivals_have_the_rate_and_the_burstiness_of_a_gamma_distribution(shape: float) -> None:
    made = Workload(num_prompts=4000, request_rate=20, burstiness=shape, input_len=1, seed=0).sessions()
    times = [session.time for session in made if session.time is not None]
    assert times[-1] == pytest.approx(4000 / 20)
    gaps = np.diff([0.0, *times])
    assert float(gaps.std() / gaps.mean()) == pytest.approx(shape**-0.5, rel=0.08)  # 1 for an exponential


# Files.


def written(file: Path, *lines: object, whole: bool = False) -> Workload:
    file.write_text(json.dumps(lines) if whole else "".join(json.dumps(line) + "\n" for line in lines), "utf-8")
    return Workload(trace=str(file), seed=0)


def test_a_trace_of_mooncake_keeps_times_lengths_and_shared_blocks(tmp_path: Path) -> None:
    lines = [
        {"timestamp": 3000, "input_length": 1000, "output_length": 5, "hash_ids": [46, 48]},
        {"timestamp": 500, "input_length": 1300, "output_length": 7, "hash_ids": [46, 47, 49]},
        {"timestamp": 3000, "input_length": 600, "output_length": 9, "hash_ids": [46]},
    ]
    made = written(tmp_path / "trace.jsonl", *lines).sessions()
    assert [session.time for session in made] == [0.5, 3.0, 3.0]
    assert [(len(session.turns[0].prompt), session.turns[0].max_tokens) for session in made] == [
        (1300, 7), (1000, 5), (600, 9),
    ]  # fmt: skip
    prompts = [session.turns[0].prompt for session in made]
    assert prompts[0][:512] == prompts[1][:512] == prompts[2][:512]
    assert prompts[0][512:520] != prompts[1][512:520] != prompts[2][512:520]
    again = replace(written(tmp_path / "trace.jsonl", *lines), request_rate=2.0, num_prompts=2).sessions()
    assert again[-1].time == 1.0  # a rate that is given replaces the times


@pytest.mark.parametrize("whole", [True, False])
def test_conversations_become_their_questions(whole: bool, tmp_path: Path) -> None:
    said = [("system", "be kind"), ("human", "hello?"), ("gpt", "x" * 41), ("human", "why?"), ("gpt", "")]
    sharegpt = {"id": "a", "conversations": [{"from": who, "value": words} for who, words in said]}
    openai = {"messages": [{"role": "user", "content": "so"}, {"role": "assistant", "content": "1234"}]}
    alone = {"messages": [{"role": "user", "content": "so"}]}
    made = written(tmp_path / "some.json", sharegpt, alone, openai, whole=whole).sessions()
    assert [session.turns for session in made] == [[Turn("hello?", 11), Turn("why?", 1)], [Turn("so", 1)]]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ({"input_length": 0, "output_length": 1}, "entry 1: not such as"),
        ({"input_length": 5, "output_length": 1.5}, "entry 1: not such as"),
        ({"timestamp": -1, "input_length": 5, "output_length": 1}, "entry 1: not such as"),
        ({"timestamp": math.inf, "input_length": 5, "output_length": 1}, "entry 1: not such as"),
        ({"prompt": "a"}, "entry 1: not such as"),
        ({"messages": [{"role": "user", "content": ["a"]}, {"role": "assistant", "content": "b"}]}, "not such as"),
        ([], "has no request"),
        ({"messages": []}, "has no request"),
    ],
)
def test_a_wrong_trace_is_refused(line: object, words: str, tmp_path: Path) -> None:
    workload = written(tmp_path / "a", line) if line else written(tmp_path / "a", whole=True)
    with pytest.raises(ValueError, match=words):
        workload.sessions()


@pytest.mark.parametrize("damage", [b'{"input_len', b"\x1f\x8b\x08", b'{"a":' + b"[" * 100_000])
def test_a_damaged_trace_is_named_with_its_line(damage: bytes, tmp_path: Path) -> None:
    workload = written(tmp_path / "a", {"input_length": 5, "output_length": 1})
    Path(str(workload.trace)).write_bytes(Path(str(workload.trace)).read_bytes().rstrip() + b"\n" + damage)
    with pytest.raises(ValueError, match=r"a is neither a JSON list nor JSON by the line"):
        workload.sessions()


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


def paced(
    times: Sequence[float | None],
    service: float,
    concurrency: int | None,
    pauses: Sequence[float] = (),
    stall: float = 0.0,
) -> list[Outcome]:
    """Send sessions whose requests take `service` seconds each, in simulated time, to a server that answers nothing
    before `stall` has passed."""

    def requests() -> Requests:
        yield 0.0, b""
        for pause in pauses:
            yield pause, b""

    async def play() -> list[Outcome]:
        sleeper = Sleeper()

        async def ask(_: bytes, planned: float) -> Outcome:
            sent = sleeper.clock.now
            await sleeper.sleep(max(service, 100 + stall - sent))
            return Outcome(planned, sleeper.clock.now, lateness=sent - planned)

        scripts = [Script.of(time, requests()) for time in times]
        task = asyncio.ensure_future(send_all(scripts, ask, concurrency, sleeper.clock, sleeper.sleep))
        return await sleeper.pass_time(task)

    return asyncio.run(play())


def test_an_open_loop_keeps_its_schedule_while_the_server_stalls() -> None:
    times = [0.0, 0.5, 0.6, 7.0]
    outcomes = paced(times, 3.0, None, stall=5.0)
    assert [one.sent - 100 for one in outcomes] == pytest.approx(times)
    assert [one.e2el for one in outcomes] == pytest.approx([5.0, 4.5, 4.4, 3.0])


def test_a_closed_loop_keeps_to_the_concurrency_and_counts_from_the_moment_of_sending() -> None:
    outcomes = paced([None] * 5, 3.0, 2)
    assert [one.sent - 100 for one in outcomes] == [0, 0, 3, 3, 6]
    assert {(one.lateness, one.e2el) for one in outcomes} == {(0.0, 3.0)}


def test_a_request_that_waits_for_the_limit_is_late_and_its_latency_counts_from_the_plan() -> None:
    """Else a stalled server would be asked less, and its stall seen by few: coordinated omission."""
    outcomes = paced([0.0, 1.0, 20.0], 3.0, 1)
    assert [one.sent - 100 for one in outcomes] == pytest.approx([0, 3, 20])
    assert [one.lateness for one in outcomes] == pytest.approx([0, 2, 0])
    assert [one.e2el for one in outcomes] == pytest.approx([3, 5, 3])


def test_a_turn_follows_its_answer_and_its_pause() -> None:
    outcomes = paced([0.0, 1.0], 3.0, None, pauses=[2.0])
    assert [one.sent - 100 for one in outcomes] == pytest.approx([0, 5, 1, 6])

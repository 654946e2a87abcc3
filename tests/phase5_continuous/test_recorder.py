"""The record of a run: what it says of a preemption, in a file, and about an engine that runs ahead.

The state machine compares every record with its engine: see `recorded.py`.
"""

from pathlib import Path

import pytest

from phase0_request import FinishReason
from phase1_kv_pool import PagedCache
from phase2_prefill_decode.scheduler import StaticScheduler
from phase3_chunked_prefill.budget import TokenBudget
from phase4_radix.prefix_cache import PrefixCache
from phase5_continuous.extras.record.lines import Line
from phase5_continuous.extras.record.record_file import read, recording
from phase5_continuous.extras.record.recorder import Recorder
from phase5_continuous.extras.record.replay import Replay
from phase5_continuous.policies import LongestPrefixFirst
from phase5_continuous.scheduler import Scheduler
from tests.phase5_continuous.support import Engine, request

DATA = Path(__file__).parent.parent / "data"


def lines_of(engine: Engine) -> list[Line]:
    lines: list[Line] = []
    recorder = Recorder(engine.core, lines.append)
    engine.run()
    recorder.close()
    return lines


def test_a_record_says_for_whom_a_request_was_preempted_and_what_it_had_when_it_resumed() -> None:
    engine = Engine(Scheduler(PagedCache(4, 4), watermark=0))
    engine.submit(request("first", 7, 6), request("second", 7, 6))
    lines = lines_of(engine)
    (at,) = [number for number, line in enumerate(lines) if "preempted" in line]
    assert lines[at]["preempted"] == [[1, 0]]
    assert lines[at]["pages"] == [["free", 1], ["grow", 0, [2]]]
    assert lines[at]["held"] == [[1, "pages", 3, 1]]
    assert [line["admitted"] for line in lines if "admitted" in line] == [[[0, 0], [1, 0]], [[1, 0]]]


def test_a_reason_is_that_of_a_request_that_the_plan_has_tried() -> None:
    """Fault: eight that wait for a prefix are tried, and not the short one behind them: a head start made it "long"."""
    budget = TokenBudget(32, 64)
    engine = Engine(Scheduler(PrefixCache(300, 4), budget=budget, policy=LongestPrefixFirst()))
    known, prefix = range(500, 512), range(1, 81)
    engine.submit(request("before", (*known, 9), 1))
    engine.run()
    engine.submit(request("first", (*prefix, *prefix), 4))
    engine.core.step()
    engine.submit(*(request(f"{tenant}{i}", (*prefix, i), 4, tenant=tenant) for i in range(4) for tenant in "ab"))
    engine.submit(request("short", (*known, 77), 4, tenant="a"))
    lines: list[Line] = []
    Recorder(engine.core, lines.append)
    engine.core.step()
    names = {new["r"]: new["id"] for line in lines for new in line.get("new", ())}
    assert [(names[r], why, names[more]) for r, why, more in lines[-1]["held"]] == [("a0", "prefix", "first")]


@pytest.mark.parametrize("ahead", [0, 1])
def test_the_end_of_a_request_is_said_once_to_who_comes_before_it_is_known(ahead: int) -> None:
    """Fault: the snapshot for a second reader between an abort and its event: the first one's request never ended."""
    engine = Engine(Scheduler(PagedCache(8, 4), ahead=ahead))
    lines: list[Line] = []
    recorder = Recorder(engine.core, lines.append)
    engine.submit(request("one", 5, 8), request("two", 5, 3))
    engine.core.step()
    engine.core.abort(engine.requests["one"])
    recorder.snapshot()
    begun: list[Line] = []
    Recorder(engine.core, begun.append)
    engine.run()
    second = [lines[0], *lines[[bool(line.get("snapshot")) for line in lines].index(True) :]]
    for seen in [line for line in lines if not line.get("snapshot")], second, begun:
        replay = Replay()
        for line in seen:
            replay.apply(line)
        assert {each.id: each.state for each in replay.requests.values()} == {"one": "abort", "two": "length"}
        assert sum(len(line.get("done", ())) for line in seen) == len(replay.requests) == 2


@pytest.mark.parametrize("text", [True, False])
def test_the_error_of_a_request_may_quote_it_and_counts_as_text(text: bool) -> None:
    engine = Engine(Scheduler(PagedCache(8, 4)))
    lines: list[Line] = []
    Recorder(engine.core, lines.append, text=text)
    engine.submit(request("one", 5, 3))
    engine.core.finish(engine.requests["one"], FinishReason.ERROR, "no such type: secret")
    engine.core.step()
    assert lines[-1]["done"] == [[0, "error", "no such type: secret"][: 3 if text else 2]]


def test_the_slices_of_a_step_that_is_planned_again_are_in_the_record_once() -> None:
    engine = Engine(Scheduler(PagedCache(8, 4), ahead=1))
    lines: list[Line] = []
    Recorder(engine.core, lines.append)
    engine.submit(request("one", 5, 3))
    engine.plan()
    engine.discard_in_flight()
    engine.run()
    assert [(line.get("prefill"), line.get("decode")) for line in lines if "step" in line] == [
        ([[0, 0, 5]], None),
        (None, [0]),
        (None, [0]),
    ]


def test_a_static_engine_can_be_recorded_too() -> None:
    engine = Engine(Scheduler(PagedCache(8, 4)))
    static = StaticScheduler(PagedCache(8, 4), batch_size=2)
    engine.core.scheduler = static  # type: ignore[assignment]
    engine.device.cache = static.cache
    lines: list[Line] = []
    recorder = Recorder(engine.core, lines.append)
    one = request("one", 5, 3)
    engine.core.submit(one)
    engine.core.abort(one)
    engine.core.drain()
    recorder.close()
    assert lines[1:] == [{"t": 0.0, "new": [{"r": 0, "id": "one", "prompt": 5, "max": 3}], "done": [[0, "abort"]]}]
    assert (engine.core.observers, static.cache.observers) == ([], [])


def test_a_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    engine, replay = Engine(Scheduler(PagedCache(8, 4))), Replay()
    engine.submit(request("one", 5, 3))
    with recording(engine.core, tmp_path / "run.jsonl.gz", lambda token: f"<{token}>", "hashes"):
        engine.run()
    vocabulary: dict[str, str] = {}
    for line in read(tmp_path / "run.jsonl.gz"):
        replay.apply(line)
        vocabulary |= line.get("vocab", {})
    (one,) = replay.requests.values()
    assert one.tokens == [*engine.requests["one"].prompt_tokens, *engine.requests["one"].output_tokens]
    assert vocabulary == {str(token): f"<{token}>" for token in one.tokens}
    assert (replay.header["model"], one.state) == ("hashes", FinishReason.LENGTH.value)


def test_the_sample_shows_what_a_viewer_must_draw() -> None:
    """`python -m phase6_integration.lab sample_record tests/data/record.jsonl.gz` writes it."""
    replay, seen, whys = Replay(), set[str](), set[str]()
    for line in read(DATA / "record.jsonl.gz"):
        replay.apply(line)
        seen |= line.keys() | {operation[0] for operation in line.get("pages", ())}
        whys |= {why for _, why, *_ in line.get("held", ())}
    assert seen >= {"new", "admitted", "preempted", "prefill", "decode", "out", "done", "vocab"}
    assert seen >= {"attach", "grow", "store", "swap", "evict", "free"}
    assert whys >= {"tokens", "places", "pages", "prefix"}
    assert not replay.tables
    assert {each.state for each in replay.requests.values()} == {"stop", "abort"}

import itertools
import json
from pathlib import Path

import pytest

from phase0_request.lab.trace import Stage, Trace


def example() -> Trace:
    trace = Trace()
    for stage, now in (
        (Stage.API, 10.0),
        (Stage.TOKENIZER, 10.1),
        (Stage.SCHEDULER, 10.2),
        (Stage.RUNNER, 10.5),
        (Stage.DETOKENIZER, 11.0),
        (Stage.SCHEDULER, 11.1),
        (Stage.RUNNER, 11.2),
        (Stage.DETOKENIZER, 11.7),
    ):
        trace.enter("a", stage, now)
    trace.leave("a", 12.0)
    trace.enter("b", Stage.API, 11.0)
    trace.leave("b", 11.5)
    trace.enter("still here", Stage.API, 11.0)
    return trace


def test_stays_follow_each_other_without_a_gap() -> None:
    spans = list(example().spans("a"))
    assert [span.stage for span in spans][:3] == [Stage.API, Stage.TOKENIZER, Stage.SCHEDULER]
    assert all(a.stop == b.start for a, b in itertools.pairwise(spans))
    assert (spans[0].start, spans[-1].stop) == (10.0, 12.0)


def test_the_stages_add_up_to_the_whole() -> None:
    totals = example().seconds_by_stage("a")
    assert totals[Stage.RUNNER] == pytest.approx(1.0)
    assert totals[Stage.SCHEDULER] == pytest.approx(0.4)
    assert sum(totals.values()) == pytest.approx(2.0)
    assert sum(example().seconds_by_stage().values()) == pytest.approx(2.5)


def test_entering_twice_is_one_stay_and_leaving_is_for_good() -> None:
    trace = Trace()
    trace.enter("a", Stage.RUNNER, 1.0)
    trace.enter("a", Stage.RUNNER, 2.0)
    trace.leave("a", 3.0)
    assert [tuple(span) for span in trace.spans()] == [("a", Stage.RUNNER, 1.0, 3.0)]
    with pytest.raises(ValueError, match="request a has left"):
        trace.enter("a", Stage.API, 4.0)


def test_old_paths_are_forgotten_and_live_ones_never() -> None:
    trace = Trace(keep=2)
    trace.enter("live", Stage.SCHEDULER, 0.0)
    for n in range(5):
        trace.enter(str(n), Stage.API, n)
        trace.leave(str(n), n + 1)
    assert {span.request_id for span in trace.spans()} == {"3", "4"}
    trace.leave("live", 9.0)
    assert {span.request_id for span in trace.spans()} == {"4", "live"}


def test_it_exports_json_from_time_zero(tmp_path: Path) -> None:
    example().write(tmp_path / "trace.json")
    requests = json.loads((tmp_path / "trace.json").read_text())
    assert [r["request"] for r in requests] == ["a", "b"]
    assert requests[0]["spans"][1] == {
        "stage": "tokenizer",
        "start": pytest.approx(0.1),
        "stop": pytest.approx(0.2),
    }


def test_it_exports_what_chrome_reads(tmp_path: Path) -> None:
    """The Trace Event Format: complete events with microsecond ts and dur, a named row a request."""
    example().write(tmp_path / "trace.chrome.json")
    events = json.loads((tmp_path / "trace.chrome.json").read_text())["traceEvents"]
    rows = {e["tid"]: e["args"]["name"] for e in events if e["ph"] == "M"}
    stays = [e for e in events if e["ph"] == "X"]
    assert len(stays) == 9
    assert {rows[e["tid"]] for e in stays} == {"a", "b"}
    for e in stays:
        assert e.keys() >= {"name", "ph", "ts", "dur", "pid", "tid"}
        assert e["ts"] >= 0
        assert e["dur"] >= 0
    runner = next(e for e in stays if e["name"] == "model runner")
    assert (runner["ts"], runner["dur"]) == (pytest.approx(500_000), pytest.approx(500_000))

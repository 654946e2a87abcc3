"""The goodput study, from which the chapter's tables come."""

import json
import sys
from pathlib import Path

import pytest

from phase5_continuous.lab import goodput
from phase5_continuous.lab.simulator import WAYS
from tests.terminal import after_the_view, on_a_terminal


def test_goodput_equals_the_arrival_rate_when_every_request_meets_its_slo() -> None:
    """However many requests happen to arrive, and however long the last ones take."""
    for rate in (5, 20):
        found = goodput.poisson("fcfs", rate, seconds=4)
        assert (found.requests, found.kept, found.goodput) == (4 * rate, 1.0, rate)


def test_above_capacity_goodput_falls_the_longer_it_lasts() -> None:
    short, long = (goodput.poisson("fcfs", 400, seconds) for seconds in (2, 4))
    assert 0 < long.goodput == 400 * long.kept < 0.8 * short.goodput < 300
    assert long.ttft_p50_ms > 1.5 * short.ttft_p50_ms


def test_it_writes_the_figures_that_the_chapter_quotes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(goodput, "RATES", (5, 10))
    file = tmp_path / "goodput.json"
    assert goodput.main(["--seconds", "2", "--json", str(file)]) == 0
    result = json.loads(file.read_text())
    assert result["command"] == "python -m phase5_continuous.lab goodput --seconds 2"
    figures = result["figures"]
    assert set(figures["poisson"]) == set(WAYS)
    assert all(set(points) == {"rate_5", "rate_10"} for points in figures["poisson"].values())
    assert set(figures["documents"]) == {"fcfs", "longest-prefix"}
    printed = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["fcfs", "5.0", "10.0"] in printed


def test_zero_seconds_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        goodput.main(["--seconds", "0"])
    assert stopped.value.code == 2
    assert "seconds must be at least 1, got 0" in capsys.readouterr().err


def test_ctrl_c_leaves_a_clean_terminal() -> None:
    status, seen = on_a_terminal(sys.executable, "-m", "phase5_continuous.lab", "goodput", until=b"goodput")
    assert status == 130
    assert after_the_view(seen).endswith(b"Stopped.\r\n")
    assert b"Traceback" not in seen

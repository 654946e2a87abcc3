"""The fairness study, from which the chapter's tables come."""

import json
from pathlib import Path

import pytest

from phase5_continuous.lab import fairness
from phase5_continuous.lab.simulator import Setting


def test_it_writes_the_figures_that_the_chapter_quotes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a few places and requests. A modest client waits for none of a greedy one, which loses next to nothing."""
    monkeypatch.setattr(fairness, "Setting", lambda: Setting(max_running=8))
    monkeypatch.setattr(fairness, "QUESTIONS", 3)
    monkeypatch.setattr(fairness, "BURSTS", 8)
    monkeypatch.setattr(fairness, "N", 8)
    monkeypatch.setattr(fairness, "FLOODS", {name: (200, *size) for name, (_, *size) in fairness.FLOODS.items()})
    monkeypatch.setattr(fairness, "SECONDS", 1.5)
    file = tmp_path / "fairness.json"
    assert fairness.main(["--json", str(file)]) == 0
    figures = json.loads(file.read_text())["figures"]
    one, fair = figures["served"]["one_queue"], figures["served"]["fair_queueing"]
    assert fair["ttft_max_ms"] < 100 < one["ttft_max_ms"]
    assert fair["greedy_seconds"] < 1.05 * one["greedy_seconds"]
    assert all(0.3 < share < 0.37 for share in figures["shares"]["fair_queueing"].values())

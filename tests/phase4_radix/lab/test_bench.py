"""The benchmark: what it times, and what it records."""

import json
from pathlib import Path

import pytest

from phase4_radix.lab import bench


def test_it_records_what_it_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench, "NODES", (100, 300))
    monkeypatch.setattr(bench, "LEAVES", (100, 200))
    monkeypatch.setattr(bench, "ROUNDS", 2)
    monkeypatch.setattr(bench, "RUNNING", 4)
    file = tmp_path / "phase4.json"
    bench.main(["--json", str(file)])
    result = json.loads(file.read_text())
    assert result["command"] == "python -m phase4_radix.lab bench"
    figures = result["figures"]
    assert set(figures["matching"]) == {"nodes_100", "nodes_300"}
    assert set(figures["evicting"]) == {f"leaves_{n}_pages_{each}" for n in (100, 200) for each in (1, 8)}
    assert set(figures["decoding"]) == {"running_4"}
    for group in figures.values():
        for row in group.values():
            assert min(x for x in row.values() if isinstance(x, float)) > 0
    printed = capsys.readouterr().out
    assert all(word in printed for word in ("Matching", "Evicting", "Decoding"))


def test_half_of_each_prompt_is_cached() -> None:
    """Half of a prompt is cached when it is first matched, and all of it the second time."""
    tree, prompts = bench.RadixTree(bench.PAGE), bench.Prompts()
    for _ in range(1500):
        prompts.insert(tree, prompts.one(own=4))
    known = total = 0
    for _ in range(200):
        prompt = prompts.one()
        known += len(tree.match(prompt).pages)
        total += len(prompt) // bench.PAGE
        prompts.insert(tree, prompt)
        assert len(tree.match(prompt).pages) == len(prompt) // bench.PAGE
    assert 0.48 < known / total < 0.52
    tree.check()

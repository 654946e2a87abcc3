"""The comparison with other engines: each runs as a process, is checked, and a cut comparison is continued."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from phase0_request.lab.record import commit
from phase2_prefill_decode.lab.shapes import SHAPES
from phase6_integration.lab.gpu.rows import TINY
from phase6_integration.lab.peers import compare, models
from phase6_integration.lab.peers.compare import Workload, available, row

ROOT = Path(__file__).parents[3]


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SHAPES, "17m", TINY)
    monkeypatch.setitem(compare.MODELS, "17m", compare.MODELS["17m"]._replace(vocab_size=TINY.vocab_size))
    monkeypatch.setattr(compare, "PEERS", {**compare.PEERS})
    monkeypatch.setattr(compare, "BESIDE", {**compare.BESIDE})
    monkeypatch.setattr(compare, "BUILD", tmp_path)
    monkeypatch.setattr(models, "CONTEXT", 64)
    monkeypatch.setattr(compare, "WARM_UP", ())
    monkeypatch.setitem(compare.WORKLOADS, "17m", (Workload(2, 5, 3), Workload(2, 6, 1)))
    monkeypatch.setattr(compare, "LONG", ())


def test_engines_answer_in_turn_and_a_cut_comparison_is_continued(
    small: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "peers.json"

    def run(*more: str) -> dict[str, Any]:
        given = ["--shapes", "17m", "--held-to", "native", "--rounds", "2", "--threads", "1", "--json", str(file)]
        assert compare.main([*given, *more]) == 0
        rows: dict[str, Any] = json.loads(file.read_text())["figures"]["native"]["17m"]
        return rows

    first = run("--peers", "llama*", "transformers", "ours", "--workloads", "2x5*")
    assert {*first["2x5+3"]} == {"ours", "transformers"}  # llama.cpp is not there
    log = file.with_suffix(".txt").read_text().splitlines()
    assert sum(" transformers 2x5+3 " in line for line in log) == 2 * (1 + compare.RUNS)  # one warms up in each turn
    assert first["2x5+3"]["ours"]["runs"] == 2 * compare.RUNS

    def measure(names: list[str], loads: list[Workload], *_: object) -> Iterator[tuple[Workload, Any]]:
        return ((load, {name: [2.0] for name in names}) for load in loads)

    monkeypatch.setattr(compare, "measure", measure)
    rows = run("--peers", "ours")
    assert rows["2x5+3"] == first["2x5+3"]
    assert {*rows["2x6+1"]} == {"ours"}
    assert {*run()["2x6+1"]} == {name for name in compare.PEERS if available(name, "native")}


def test_a_commit_to_compare_with_that_is_not_there_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        compare.main(["--against", "no-such-commit"])
    assert "no-such-commit" in capsys.readouterr().err


def test_figures_before_name_their_commit_and_those_of_another_are_measured_again(
    small: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    head = (commit(ROOT) or pytest.skip("a checkout has commits")).removesuffix("-dirty")
    (tmp_path / f"at-{head}").mkdir()  # its source need not be written
    file, seconds = tmp_path / "speed.json", iter([4.0, 2.0, 1.0])

    def measure(names: list[str], loads: list[Workload], *_: object) -> Iterator[tuple[Workload, Any]]:
        taken = next(seconds)
        return ((load, {name: [taken] for name in names}) for load in loads)

    def against(named: str) -> dict[str, Any]:
        given = ["--peers", "ours", "before", "--workloads", "2x6*", "--against", named, "--json", str(file)]
        with monkeypatch.context() as once:
            once.setattr(compare, "PEERS", {**compare.PEERS})
            once.setattr(compare, "BESIDE", {**compare.BESIDE})
            assert compare.main(given) == 0
        row: dict[str, Any] = json.loads(file.read_text())["figures"]["native"]["17m"]["2x6+1"]
        assert "commit" not in row["ours"], "it is that of the file"
        return row

    monkeypatch.setattr(compare, "measure", measure)
    for _ in range(2):  # what is there stays
        figures = against("HEAD")["before"]
        assert (figures["commit"], figures["median"]) == (head, 3.0)
    assert "over before" in (shown := capsys.readouterr().out)
    assert "1.00x" in shown, "what the change did is read from the table"
    result = json.loads(file.read_text())
    result["figures"]["native"]["17m"]["2x6+1"]["before"]["commit"] = "another"
    file.write_text(json.dumps(result))
    figures = against(head[:10])["before"]
    assert (figures["commit"], figures["median"]) == (head, 6.0)


@pytest.mark.slow  # compiles the kernels of that commit
def test_the_engine_of_a_commit_takes_turns_with_this_one(small: None, tmp_path: Path) -> None:
    file = tmp_path / "speed.json"
    given = ["--peers", "ours", "before", "--workloads", "2x5*", "--rounds", "1", "--threads", "1", "--json", str(file)]
    assert compare.main([*given, "--against", "HEAD"]) == 0
    figures = json.loads(file.read_text())["figures"]["native"]["17m"]["2x5+3"]
    assert len(figures["before"]["commit"]) == 40
    assert figures["ours"]["over_before"] == figures["ours"]["median"] / figures["before"]["median"]


def test_rates_are_medians_of_answers_or_of_prompts() -> None:
    """Tokens of the answers a second, or of the prompts if an answer is one token."""
    seconds = {"ours": [0.5, 4.0, 1.0], "llama": [2.0, 2.0, 2.0]}
    figures = row(Workload(8, 16, 4), seconds)
    assert figures["ours"] == {"median": 32, "least": 8, "most": 64, "runs": 3, "over_llama": 2.0}
    assert row(Workload(4, 512, 1), seconds)["llama"]["median"] == 1024


def test_no_round_finds_its_prompts_in_a_prefix_cache_but_those_of_cached_workloads_do() -> None:
    prompts = [load.prompts(1000, seed) for load in (Workload(8, 32, 4), Workload(16, 32, 4)) for seed in (1, 2)]
    assert len({tuple(prompt[:16]) for some in prompts for prompt in some}) == 48
    again = Workload(1, 33, 4, cached=True)
    assert again.prompts(1000, 1) == again.prompts(1000, 2)

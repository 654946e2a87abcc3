"""The benchmarks of this phase on tiny models: what they read, compute and record."""

import json
from pathlib import Path

import pytest
import torch
from rich.console import Console

from phase2_prefill_decode.lab import bench, ceilings, comparison, phases
from phase2_prefill_decode.lab.comparison import Workload
from phase2_prefill_decode.lab.shapes import SHAPES
from phase2_prefill_decode.loading.config import ModelConfig

TINY = ModelConfig(
    vocab_size=64,
    num_hidden_layers=1,
    num_attention_heads=2,
    hidden_size=16,
    max_position_embeddings=64,
    tie_word_embeddings=True,
    qk_norm=True,
    dtype="float32",
)
THEIRS = """engine version v1.2.3
theirs requests=1 prompt=4 output=3 shared=0: 0.50 s, 6.0 output tok/s
theirs requests=1 prompt=4 output=3 shared=5: 0.01 s, 300.0 output tok/s
theirs requests=2 prompt=5 output=1: 2.00 s, 1.0 output tok/s
theirs requests=9 prompt=9 output=9: 9.00 s, 9.0 output tok/s
"""


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SHAPES, "17m", TINY)
    for module in (bench, comparison):
        monkeypatch.setattr(module, "WORKLOADS", (Workload(1, 4, 3), Workload(2, 5, 1)))
    monkeypatch.setattr(bench, "default_device", lambda: torch.device("cpu"))
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)


@pytest.fixture
def theirs(tmp_path: Path) -> Path:
    file = tmp_path / "theirs.txt"
    file.write_text(THEIRS)
    return file


def test_engines_side_by_side(tmp_path: Path, theirs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "bench.json"
    bench.main(["--runs", "1", "--threads", "2", "--beside", f"17m:Theirs={theirs}", "--json", str(file)])
    result = json.loads(file.read_text())
    wanted = "python -m phase2_prefill_decode.lab bench --shape 17m --runs 1 --threads 2 --beside 17m:Theirs=theirs.txt"
    assert result["command"] == wanted
    figures = result["figures"]
    assert figures["peers"] == {"Theirs": "1.2.3"}
    assert set(figures["17m"]) == {"1x4+3", "2x5+1"}
    for name, rate in (("1x4+3", 3 / 0.5), ("2x5+1", 2 * 5 / 2.0)):  # of the answer; of the prompts
        row = figures["17m"][name]
        assert row["Theirs"] == rate
        for other in ("Theirs", "transformers"):
            assert row[f"over_{other}"] == pytest.approx(row["nano-serving"] / row[other])
    printed = capsys.readouterr().out
    assert all(word in printed for word in ("nano-serving", "transformers", "Theirs", "1x4+3", "2x5+1"))


def test_both_engines_give_the_same_answers(tmp_path: Path) -> None:
    bench.save_random("17m", tmp_path)
    ours, theirs = (make(tmp_path, torch.device("cpu")) for make in (bench.ours, bench.theirs))
    prompts = Workload(2, 5, 3).prompts(64, 0)
    for answers in (ours(prompts, 3), theirs(prompts, 3)):
        assert [len(answer) for answer in answers] == [3, 3]
    assert ours(prompts, 1) == theirs(prompts, 1)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--runs=0"], "must be an integer from 1, got '0'"),
        (["--threads=0"], "must be an integer from 1, got '0'"),
        (["--threads=-2"], "must be an integer from 1, got '-2'"),
        (["--beside=garbage"], "'garbage' must be SHAPE:NAME=FILE with one of the shapes"),
        (["--beside=5t:x={}"], "must be SHAPE:NAME=FILE with one of the shapes"),
        (["--beside=17m:={}"], "must be SHAPE:NAME=FILE with one of the shapes"),
        (["--beside=17m:x"], "'17m:x' must be SHAPE:NAME=FILE with one of the shapes"),
        (["--beside=17m:x=/nowhere"], "/nowhere cannot be read: "),
        (["--beside=17m:x=."], ". cannot be read: "),
        (["--beside=596m:x={}"], "that shape is not measured here; those that are: 17m"),
        (["--beside=17m:x={}", "empty"], "has no line for any of the workloads 1x4+3, 2x5+1"),
    ],
)
def test_bad_options_are_refused_before_anything_is_measured(
    options: list[str], words: str, theirs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench, "measure", lambda *_: pytest.fail("it was measured"))
    if options[1:] == ["empty"]:
        theirs.write_text("it crashed")
    with pytest.raises(SystemExit, match="2"):
        bench.main([options[0].format(theirs)])
    assert words in " ".join(capsys.readouterr().err.split())


def test_phases_records_a_point_for_each_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in (("PROMPTS", (1, 4)), ("BATCHES", (1, 2)), ("CONTEXTS", (8,)), ("CONTEXT", 8), ("SECONDS", 0.0)):
        monkeypatch.setattr(phases, name, value)
    monkeypatch.setattr(ceilings, "SIZES", {"cpu": (32,)})
    monkeypatch.setattr(ceilings, "OUT_OF_CACHE", {"cpu": 1 << 20})
    monkeypatch.setattr(ceilings, "WIDTH", 256)
    monkeypatch.setattr("phase1_kv_pool.lab.timing.SECONDS", 0.0)
    monkeypatch.setattr(phases, "default_device", lambda: torch.device("cpu"))
    file = tmp_path / "phases.json"
    phases.main(["--json", str(file)])
    result = json.loads(file.read_text())
    assert result["command"] == "python -m phase2_prefill_decode.lab phases --shape 17m"
    points = result["figures"]["points"]
    assert set(points) == {"prefill_1_1", "prefill_1_4", "decode_1_8", "decode_2_8", "decode_8_8"}
    for point in points.values():
        assert point["ms"] == pytest.approx(1e3 * point["seconds"])
        assert point["token_us"] == pytest.approx(1e6 * point["seconds"] / (point["batch"] * point["tokens"]))
        assert min(point["operations"], point["bytes"], point["predicted"]) > 0
    assert points["decode_2_8"]["operations"] == 2 * points["decode_1_8"]["operations"]
    assert points["decode_2_8"]["bytes"] < 2 * points["decode_1_8"]["bytes"]
    assert len([line for line in capsys.readouterr().out.splitlines() if line.startswith(("prefill", "decode"))]) == 5


def test_the_table_of_phases_fits_into_80_columns() -> None:
    point = phases.Point("decode", 64, 2048, 40960, 12.3456789, 10**16, 10**13, 9.87654321)
    console = Console(width=80)
    with console.capture() as shown:
        console.print(phases.table([point]))
    *_, row = shown.get().splitlines()
    assert " ".join(row.split()) == "decode 64 2048 40960 12,345.68 9,876.54 94 810,000.0 810.0 1,000.0"

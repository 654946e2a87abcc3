"""Each command of a lab, made small, runs and writes the figures that the book quotes from chapters/results."""

import fnmatch
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from matplotlib.figure import Figure

from chapters import tables
from chapters.charts import CHARTS
from chapters.claims import CLAIM, REFERENCE
from chapters.tiny_chat import quantized
from phase0_request.lab.commands import contents, main
from phase0_request.support.machine import describe
from phase0_request.tokenizer import BUNDLED
from phase2_prefill_decode.lab import ceilings
from phase2_prefill_decode.lab.cpu import beside
from phase2_prefill_decode.lab.models import experts
from phase2_prefill_decode.lab.shapes import SHAPES
from phase4_radix.lab import replay
from phase5_continuous.lab import fairness, growth
from phase5_continuous.lab.exploring.worlds import BUGS, WORLDS
from phase5_continuous.lab.families import checkpoints
from phase5_continuous.lab.simulator import Setting
from phase6_integration.lab import bench
from phase6_integration.lab.scale import apart, routers
from tests.phase2_prefill_decode.ranks_in_threads import RanksInThreads
from tests.phase2_prefill_decode.tiny import TINY
from tests.phase6_integration.lab.test_loops import served

CHAPTERS = Path(__file__).parent.parent / "chapters"
CEILINGS = {
    "phase1_kv_pool.lab.timing.SECONDS": 0.0,
    "phase2_prefill_decode.lab.ceilings.SIZES": {"cpu": (32,)},
    "phase2_prefill_decode.lab.ceilings.OUT_OF_CACHE": {"cpu": 1 << 20},
    "phase2_prefill_decode.lab.ceilings.WIDTH": 256,
    "phase2_prefill_decode.lab.ceilings.CONTEXT": 64,
    "phase2_prefill_decode.lab.peaks.STEPS": 1000,
    "phase2_prefill_decode.lab.rows.OUTPUTS": 128,
    "phase2_prefill_decode.lab.rows.INPUTS": 256,
}
SMALL_EXPERTS = {
    "hidden_size": 64, "intermediate_size": 32, "num_attention_heads": 4, "num_key_value_heads": 4, "num_experts": 8,
    "num_experts_per_tok": 2,
}  # fmt: skip
SMALL_LFM2 = checkpoints.SHAPE | {
    "vocab_size": 64, "num_hidden_layers": 3, "hidden_size": 32, "block_ff_dim": 48, "intermediate_size": 48,
    "num_attention_heads": 2, "num_key_value_heads": 1, "full_attn_idxs": [1],
}  # fmt: skip
# The result, its benchmark with options, and what makes it small.
BENCHMARKS: dict[str, tuple[str, list[str], dict[str, object]]] = {
    "phase0.json": ("phase0_request.lab.bench", ["-n", "60"], {"BATCH_SIZES": (32, 128)}),
    "phase1.json": (
        "phase1_kv_pool.lab.bench",
        ["--device", "cpu"],
        {"POOLS": (200,), "EVENTS": 1000, "TOKENS": (1, 70), "SEQUENCE": 1024, "CALLS": 16, **CEILINGS},
    ),
    "fragmentation.json": (
        "phase1_kv_pool.lab.fragmentation",
        ["--num-requests", "40", "--slots", "4096", "--max-context", "1024"],
        {},
    ),
    "phase2_alone.json": (
        "phase2_prefill_decode.lab.alone",
        ["--requests", "5"],
        {"LENGTHS": (8, 20), "OUTPUT": 4, "BATCHES": (4,)},
    ),
    "experts.json": (
        "phase2_prefill_decode.lab.models.experts",
        [],
        {"SHAPE": experts.SHAPE | SMALL_EXPERTS, "STEPS": 2, "ROUNDS": 1},
    ),
    "phase2_recompute.json": ("phase2_prefill_decode.lab.naive.recompute", [], {"ANSWERS": (4, 8), "RUNS": 1}),
    "phase2_phases.json": (
        "phase2_prefill_decode.lab.phases",
        [],
        {"PROMPTS": (1, 4), "BATCHES": (1, 2), "CONTEXTS": (8,), "CONTEXT": 8, "SECONDS": 0.0, **CEILINGS},
    ),
    "phase2_rows.json": (
        "phase2_prefill_decode.lab.rows",
        ["--rounds", "1"],
        {"OUTPUTS": 128, "INPUTS": 256, "phase1_kv_pool.lab.timing.SECONDS": 0.0},
    ),
    "capacity.json": ("phase6_integration.lab.scale.capacity", [], {}),
    "products.json": (
        "phase2_prefill_decode.lab.cpu.products",
        ["--rounds", "1"],
        {"BYTES": 1 << 10, "phase1_kv_pool.lab.timing.SECONDS": 0.0, **CEILINGS},
    ),
    "beside.json": (
        "phase2_prefill_decode.lab.cpu.beside",
        ["--rounds", "1", "--seconds", "0"],
        {"LOADS": dict.fromkeys(beside.LOADS, (1, 2, 8))},
    ),
    "phase2_fits.json": ("phase2_prefill_decode.lab.fits", [], {}),
    "phase2_models.json": ("phase2_prefill_decode.lab.models.takes", [], {}),
    "quantized.json": (
        "chapters.tiny_chat.quantized",
        ["--questions", "2"],
        {
            "SCHEMES": {
                name: quantized.SCHEMES[name]
                for name in ("int8", "fp8", "int4_weights", "int4_nearest_32", "int4_nearest_row")
            }
        },
    ),
    "stall.json": ("phase3_chunked_prefill.lab.stall", ["--prompt", "90", "--runs", "1"], {"CHUNKS": (0, 64)}),
    "phase4.json": (
        "phase4_radix.lab.study",
        ["--runs", "1"],
        {
            "REQUESTS": 2,
            "COMMONS": (0, 64),
            "PEOPLE": (8,),
            "PAGE_SIZES": (16,),
            "PROMPT": 80,
            "COMMON": 64,
            "chats": lambda people: replay.chats(people, (192,)),
            "pressure": lambda in_turn: replay.pressure(in_turn, (40,)),
        },
    ),
    "phase4_bench.json": (
        "phase4_radix.lab.bench",
        [],
        {"NODES": (100,), "LEAVES": (100,), "ROUNDS": 2, "RUNNING": 4},
    ),
    "phase5.json": ("phase5_continuous.lab.bench", [], {"RUNNING": (1, 4), "PROFILED_STEPS": 5}),
    "phase5_explore.json": (
        "phase5_continuous.lab.explore",
        ["--all", "--processes", "1"],
        {"WORLDS": dict.fromkeys(WORLDS, WORLDS["smallest"]), "BUGS": {"4a": BUGS["4a"]}},
    ),
    "phase5_fairness.json": (
        "phase5_continuous.lab.fairness",
        [],
        {
            "Setting": lambda: Setting(max_running=8),
            "QUESTIONS": 3,
            "BURSTS": 8,
            "N": 8,
            "FLOODS": {name: (20, *size) for name, (_, *size) in fairness.FLOODS.items()},
        },
    ),
    "phase5_goodput.json": ("phase5_continuous.lab.goodput", ["--seconds", "1"], {"RATES": (5, 10)}),
    "checkpoints.json": (
        "phase5_continuous.lab.families.checkpoints",
        ["--people", "1"],
        {
            "SHAPE": SMALL_LFM2,
            "INSTRUCTION": 16,
            "QUESTION": 4,
            "ANSWER": 4,
            "REPLAYED": 8,
        },
    ),
    "identity.json": (
        "phase5_continuous.lab.families.identity",
        ["--families", "phi3", "--seeds", "1", "--no-ranks"],
        {},
    ),
    "phase5_growth.json": (
        "phase5_continuous.lab.growth",
        [],
        {"TRACE": growth.Trace(kind="batch", requests=12, prompt=40, answer=40), "PAGES": 64},
    ),
    "phase5_study.json": (
        "phase5_continuous.lab.study",
        ["-n", "2", "--runs", "1", "--many", "20"],
        {"MOST": 8, "PAGES": 64},
    ),
    "speculation.json": (
        "phase5_continuous.lab.speculation",
        ["--rounds", "1"],
        {"BATCHES": (1,), "SHARES": (0.95,), "TOKENS": {"tiny_chat": 8, "596m": 8}},
    ),
    "speculation_596m.json": (
        "phase5_continuous.lab.speculation",
        ["--model", "596m", "--rounds", "1"],
        {"BATCHES": (1,), "SHARES": (0.95,), "TOKENS": {"596m": 2}, "SHAPES": {"596m": replace(TINY, vocab_size=256)}},
    ),
    "speculation_drafter.json": (
        "phase5_continuous.lab.speculation",
        ["--rounds", "1", "--drafter", str(BUNDLED)],
        {"BATCHES": (1,), "DEEPER": 2},
    ),
    "record_cost.json": (
        "phase6_integration.lab.record_cost",
        [],
        {"RUNNING": (1, 2), "CHURN": 3, "ROUNDS": 1, "PROMPT": 8, "SHORT": 4},
    ),
    "kv_events.json": ("phase6_integration.lab.event_cost", [], {"RUNNING": 256, "STEPS": 2, "ROUNDS": 1}),
    "tensor_parallel.json": (
        "phase6_integration.lab.tensor_parallel",
        [],
        {"STEPS": 1, "phase2_prefill_decode.extras.parallel.load.Ranks": RanksInThreads},
    ),
    "routing_by_balance.json": (
        "phase6_integration.lab.scale.routers",
        ["--replicas", "3", "-n", "300", "--only-large", "random", "round_robin"],
        {"SMALL": routers.Size(2, 20, 8.0, 2048)},
    ),
    "routing.json": (
        "phase6_integration.lab.scale.routers",
        ["--replicas", "3", "-n", "300"],
        {
            "SMALL": routers.Size(2, 20, 8.0, 2048),
            "LOADS": {name: (rates[-1],) for name, rates in routers.LOADS.items()},
            "PERIODS": (0.0,),
            "POOLS": (8192,),
            "FRONTS": (4,),
            "FEWER": 2,
            "SECONDS": 2,
        },
    ),
    "apart.json": (
        "phase6_integration.lab.scale.apart",
        ["-n", "3"],
        {"PROMPTS": (16, 40), "ANSWER": 4, "CHUNKS": (16, apart.WHOLE)},
    ),
    "loops.json": (
        "phase6_integration.lab.scale.loops",
        ["--requests", "4", "--clients", "1", "4"],
        {"phase6_integration.lab.bench.Bench.served": served},
    ),
    "phase6_overlap.json": ("phase6_integration.lab.overlap", ["--batches", "256", "--steps", "6"], {"CONTEXT": 32}),
}


def paths(figures: Any, path: str = "") -> Iterator[str]:
    """The keys of nested figures, with # for numbers: "points.decode_#_#.ms"."""
    for key, value in figures.items():
        here = f"{path}.{key}" if path else key
        yield from paths(value, here) if isinstance(value, dict) else (pattern(here),)


def pattern(path: str) -> str:
    return "profile" if path.startswith("profile.") else re.sub("[0-9]+", "#", path)


def quoted(result: str, known: set[str]) -> set[str]:
    """The figures of a result, of those known, that the book's pages quote or a claim there compares: of it, or of the
    same at another size of the model."""
    pages = "".join(page.read_text("utf-8") for page in CHAPTERS.glob("*.md"))
    results = rf"{result.removesuffix('.json')}(?:_[0-9]+m)?\.json"
    shown = [
        key for page in CHAPTERS.glob("*.md") for key in tables.quoted(page.read_text("utf-8"), CHAPTERS, page.stem)
    ]
    names = [name for key in shown for file, name in [key.split("#")] if re.fullmatch(results, file)]
    for claim in CLAIM.findall(pages):
        file = ""
        for named, key, _ in REFERENCE.findall(claim):
            file = named or file
            names += [key] if re.fullmatch(results, file) else []
    return {path for name in map(pattern, names) for path in fnmatch.filter(known, name) or [name]}


@pytest.mark.parametrize("result", BENCHMARKS)
def test_a_benchmark_writes_what_the_book_quotes(
    result: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module, options, small = BENCHMARKS[result]
    monkeypatch.setitem(SHAPES, "17m", TINY)
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    for name, value in small.items():
        monkeypatch.setattr(name if "." in name else f"{module}.{name}", value)
    file = tmp_path / result
    assert import_module(module).main([*options, "--json", str(file)]) == 0
    written = json.loads(file.read_text())
    known = set(paths(json.loads((CHAPTERS / "results" / result).read_text())["figures"]))
    found = set(paths(written["figures"]))
    assert quoted(result, known) <= found <= known, "the result, measured anew, has other figures"
    assert written["command"].startswith(f"python -m {module.replace('.lab.', '.lab ')}")
    assert capsys.readouterr().out
    for source, _, paint in CHARTS.values():
        if source == result:
            paint(Figure(), written)


@pytest.mark.parametrize("name", ["gpu", "cpu"])
def test_the_record_of_a_server_names_the_device_of_the_server(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = replace(describe(), gpu="a GPU")
    monkeypatch.setattr("phase0_request.lab.report.describe", lambda: machine)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: name == "gpu")
    monkeypatch.setattr(bench, "measure", lambda *_: {})
    assert bench.main(["--json", str(tmp_path / "http.json")]) == 0
    assert json.loads((tmp_path / "http.json").read_text())["device"] == getattr(machine, name)


def test_ceilings_count_the_operations_and_bytes_of_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A number of 16 bits is multiplied and added once for each row, and one of a key for each head of its group."""
    for name, value in CEILINGS.items():
        monkeypatch.setattr(name, value)
    file = tmp_path / "ceilings.json"
    assert ceilings.main(["--device", "cpu", "--json", str(file)]) == 0
    figures = json.loads(file.read_text())["figures"]
    kernels = {name: rates["gflops"] / rates["gb_per_second"] for name, rates in figures["kernels"].items()}
    for rows in ceilings.ROWS:
        assert kernels[f"product_bfloat16_rows_{rows}"] == pytest.approx(rows)
        assert kernels[f"product_int8_rows_{rows}"] == pytest.approx(2 * rows, rel=0.01), "and the scales"
    assert kernels["attention_decode_64"] == pytest.approx(ceilings.GROUP)
    assert min(figures["peak_gflops"].values()) > 0


@pytest.mark.parametrize("phase", [file.parent.name for file in sorted(CHAPTERS.parent.glob("phase?_*/lab"))])
def test_every_command_of_a_lab_is_listed_and_runs_by_its_name(phase: str, capsys: pytest.CaptureFixture[str]) -> None:
    lab = f"{phase}.lab"
    assert main(lab, []) == 0
    shown = capsys.readouterr().out
    assert [line.split()[0] for line in shown.splitlines()[2:]] == [*contents(lab)]
    for name in contents(lab):
        with pytest.raises(SystemExit, match=r"^0$"):
            main(lab, [name, "--help"])
        command = f"python -m {phase}" if name == "demo" else f"python -m {lab} {name}"
        assert capsys.readouterr().out.split()[: 1 + len(command.split())] == ["usage:", *command.split()]
    with pytest.raises(SystemExit, match=r"^2$"):
        main(lab, ["bnech"])
    assert "there is no 'bnech' here; it has" in capsys.readouterr().err

"""Each benchmark, made small, still writes the figures that the book quotes from chapters/results."""

import json
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from phase2_prefill_decode.lab.shapes import SHAPES
from phase4_radix.lab import replay
from tests.phase2_prefill_decode.tiny import TINY

RESULTS = Path(__file__).parent.parent / "chapters" / "results"
CEILINGS = {
    "phase1_kv_pool.lab.timing.SECONDS": 0.0,
    "phase2_prefill_decode.lab.ceilings.SIZES": {"cpu": (32,)},
    "phase2_prefill_decode.lab.ceilings.OUT_OF_CACHE": {"cpu": 1 << 20},
    "phase2_prefill_decode.lab.ceilings.WIDTH": 256,
}
# The result, its benchmark with options, and what makes it small.
BENCHMARKS: dict[str, tuple[str, list[str], dict[str, object]]] = {
    "phase0.json": ("phase0_request.lab.bench", ["-n", "200"], {"BATCH_SIZES": (32, 128)}),
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
    "phase2_phases.json": (
        "phase2_prefill_decode.lab.phases",
        [],
        {"PROMPTS": (1, 4), "BATCHES": (1, 2), "CONTEXTS": (8,), "CONTEXT": 8, "SECONDS": 0.0, **CEILINGS},
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
    "phase5.json": ("phase5_continuous.lab.bench", [], {"RUNNING": (1, 4), "LIVES": 20, "PROFILED_STEPS": 5}),
    "phase5_goodput.json": ("phase5_continuous.lab.goodput", ["--seconds", "1"], {"RATES": (5, 10)}),
    "phase5_study.json": (
        "phase5_continuous.lab.study",
        ["-n", "2", "--runs", "1", "--many", "20"],
        {"MOST": 8, "PAGES": 64},
    ),
}


def paths(figures: Any, path: str = "") -> Iterator[str]:
    """The keys of nested figures, with # for numbers: "points.decode_#_#.ms"."""
    for key, value in figures.items():
        here = f"{path}.{re.sub('[0-9]+', '#', key) if path != '.profile' else 'function'}"
        yield from paths(value, here) if isinstance(value, dict) else (here,)


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
    import_module(module).main([*options, "--json", str(file)])
    written, quoted = (json.loads(one.read_text()) for one in (file, RESULTS / result))
    assert set(paths(written["figures"])) == set(paths(quoted["figures"]))
    command = f"python -m {module.replace('.lab.', '.lab ')}"
    assert written["command"].startswith(command)
    assert quoted["command"].startswith(command)
    assert capsys.readouterr().out

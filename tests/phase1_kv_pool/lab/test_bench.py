import json
from collections.abc import Iterator
from functools import partial
from itertools import islice
from pathlib import Path

import pytest
import torch

from phase1_kv_pool.lab import bench
from phase1_kv_pool.lab.timing import clock_seconds
from phase1_kv_pool.pool import KVPool

SLOTS = bench._slots


def few_slots(tokens: int, pool: KVPool) -> Iterator[torch.Tensor]:
    """Those of the first calls of thousands."""
    return islice(SLOTS(tokens, pool), 16)


def test_bench_records_its_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench, "POOLS", (200, 400))
    monkeypatch.setattr(bench, "allocating", partial(bench.allocating, events=1000))
    monkeypatch.setattr(bench, "TOKENS", (1, 70))
    monkeypatch.setattr(bench, "_slots", few_slots)
    monkeypatch.setattr(bench, "SEQUENCE", 1024)
    monkeypatch.setattr("phase1_kv_pool.lab.timing.SECONDS", 0.0)
    threads = torch.get_num_threads()
    file = tmp_path / "phase1.json"
    bench.main(["--device", "cpu", "--json", str(file)])
    assert torch.get_num_threads() == threads
    result = json.loads(file.read_text())
    assert result["command"] == "python -m phase1_kv_pool.lab bench --device cpu"
    figures = result["figures"]
    assert set(figures["allocator"]) == {f"pool_{pool}_pages_{n}" for pool in (200, 400) for n in (1, 8, 64)}
    assert set(figures["store"]) == {f"{way}_{n}" for way in ("reference", "cpu", "copy") for n in (1, 70)}
    assert set(figures["layout"]) == {f"page_{n}_{order}" for n in (16, 64) for order in ("shuffled", "neighbours")}
    for group in figures.values():
        for row in group.values():
            assert min(x for x in row.values() if isinstance(x, float)) > 0
    printed = capsys.readouterr().out
    assert all(word in printed for word in ("Allocator", "Store", "Layout", "reference", "heads first"))


@pytest.mark.parametrize("tokens", [1, 64, 65, 512])
def test_store_slots_are_those_of_decode_and_prefill_steps(tokens: int) -> None:
    """No slot twice in one call; a decode writes one token to each page, a prompt whole pages; all pages are used."""
    pool = KVPool(bench.LAYER, 256)
    calls = list(bench._slots(tokens, pool))
    pages = tokens if tokens <= 64 else -(-tokens // 16)
    assert len(calls) == 256 // pages
    for slots in calls:
        assert len(set(slots.tolist())) == tokens
        assert len(set((slots // 16).tolist())) == pages
    all_slots = torch.cat(calls)
    assert len(set(all_slots.tolist())) == len(all_slots)
    assert all_slots.min() >= 0
    assert all_slots.max() < pool.num_slots


def test_every_call_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("phase1_kv_pool.lab.timing.SECONDS", 0.0)
    made: list[int] = []
    assert clock_seconds([lambda: made.append(1), lambda: made.append(2)]) > 0
    assert made == [1, 2, 1, 2]


def test_a_missing_gpu_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        bench.main(["--device", "cuda"])
    assert "sees no GPU here" in capsys.readouterr().err

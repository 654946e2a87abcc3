import json
from pathlib import Path

import pytest

from phase0_request.lab import bench


def test_bench_records_its_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "BATCH_SIZES", (32, 128))
    file = tmp_path / "phase0.json"
    bench.main(["--num-requests", "200", "--json", str(file)])
    result = json.loads(file.read_text())
    assert result["command"] == "python -m phase0_request.lab bench --num-requests 200"
    host = [result["figures"]["host"][f"batch_{size}"] for size in bench.HOST_BATCH_SIZES]
    assert all(h["plan_us"] > 0 and h["commit_us"] > 0 and h["submit_us"] > 0 for h in host)
    assert [h["steps"] for h in host] == sorted((h["steps"] for h in host), reverse=True)
    assert set(result["figures"]["batching"]) == {f"batch_{size}" for size in bench.BATCH_SIZES}


def test_a_larger_batch_trades_latency_between_tokens_for_throughput() -> None:
    """As the chapter says: a batch size of eight gives nearly eight times the tokens of one."""
    one, eight, many = bench.batching(1, 64), bench.batching(8, 64), bench.batching(64, 64)
    assert 4 < eight.tokens_per_second / one.tokens_per_second <= 8
    assert one.itl_p99_ms < eight.itl_p99_ms
    assert one.ttft_p50_ms > eight.ttft_p50_ms > many.ttft_p50_ms


def test_a_benchmark_needs_a_request(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench.main(["--num-requests", "0"])
    assert "at least 1, got 0" in capsys.readouterr().err

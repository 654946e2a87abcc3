import json
import sys
from pathlib import Path

import pytest

from phase5_continuous.lab import bench
from tests.terminal import after_the_view, on_a_terminal


def test_it_records_what_it_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench, "RUNNING", (1, 4))
    monkeypatch.setattr(bench, "LIVES", 20)
    monkeypatch.setattr(bench, "PROFILED_STEPS", 5)
    file = tmp_path / "phase5.json"
    bench.main(["--json", str(file)])
    result = json.loads(file.read_text())
    assert result["command"] == "python -m phase5_continuous.lab bench"
    figures = result["figures"]
    assert set(figures["steady"]) == {f"{cache}_{n}" for cache in ("plain", "prefix") for n in (1, 4)}
    assert set(figures["lives"]) == {"plain", "prefix"}
    for group in ("steady", "lives"):
        for row in figures[group].values():
            assert min(x for x in row.values() if isinstance(x, float)) > 0
    shares = figures["profile"]
    assert "BaseScheduler._advance" in shares
    assert 0.5 < sum(shares.values()) <= 1
    printed = capsys.readouterr().out
    assert all(word in printed for word in ("All requests decode", "Whole lives", "Where the time goes", "prefix"))


@pytest.mark.parametrize("cache", ["plain", "prefix"])
def test_every_request_decodes_in_every_timed_step(cache: str) -> None:
    one = bench.decoding(bench.CACHES[cache], running=20, steps=30)
    for step in range(30):
        batch = one.plan(step)
        assert batch.tokens_by_kind == (0, 20)
        one.commit(batch, bench.answer(batch), step)


def test_both_caches_serve_the_same_requests() -> None:
    plain, prefix = (bench.lives(cache, running=8, requests=30) for cache in ("plain", "prefix"))
    assert plain.slices == prefix.slices > 30 * 30


def test_ctrl_c_leaves_a_clean_terminal() -> None:
    status, seen = on_a_terminal(sys.executable, "-m", "phase5_continuous.lab", "bench", until=b"steady")
    assert status == 130
    assert after_the_view(seen).endswith(b"Stopped.\r\n")
    assert b"Traceback" not in seen

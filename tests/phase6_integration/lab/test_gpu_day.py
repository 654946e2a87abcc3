"""The command for a GPU: its stages on a CPU with tiny shapes, and how it goes on after a cut."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from phase6_integration.lab import gpu_day
from phase6_integration.lab.gpu_stages import STAGES, idle_share

ROOT = Path(__file__).parents[3]

# Importing what the machine with a GPU lacks raises ImportError.
WITHOUT_SERVER = """
import sys
for name in ("msgspec", "fastapi", "starlette", "pydantic", "uvicorn", "httptools"):
    sys.modules[name] = None
"""


@pytest.mark.slow
def test_a_dry_run_fills_every_stage_without_the_packages_of_the_server(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(WITHOUT_SERVER)
    file = tmp_path / "day.json"
    command = [sys.executable, "-m", "phase6_integration.lab", "gpu_day", "--dry", "--json", str(file)]
    environment = {"PYTHONPATH": f"{tmp_path}:{ROOT}", "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(file.read_text())
    assert result["command"] == "python -m phase6_integration.lab gpu_day --dry --json day.json"
    assert {"torch", "transformers"} <= set(result["versions"])
    stages: dict[str, Any] = result["figures"]
    assert set(stages) == set(gpu_day.CAPS) == set(STAGES)
    for name, stage in stages.items():
        assert stage["state"] == "ok", stage["log"]
        assert stage["rows"], name
    errors = [row["error"] for stage in stages.values() for row in stage["rows"] if "error" in row]
    assert errors == []
    assert {row["what"] for row in stages["kernels"]["rows"]} == {"ceilings", "decode", "prefill", "sample"}
    steps = stages["step"]["rows"][0]
    assert steps["batch_1"]["of_roofline"] > 0
    assert 0 <= stages["idle"]["rows"][0]["batch_2"]["idle_share"] < 1
    assert stages["serve"]["rows"][0]["greedy"]["tokens_per_second"] > 0
    ours, theirs = stages["beside"]["rows"]
    assert (ours["engine"], theirs["engine"], theirs["tokens"]) == ("nano-serving", "transformers", 2 * 3)


def test_a_stage_that_takes_too_long_is_cut() -> None:
    found = gpu_day.run_stage("smoke", dry=True, seconds=0.01)
    assert (found["state"], found["rows"]) == ("cut after 0 s", [])


def test_the_next_call_goes_on_with_the_stages_that_did_not_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, ran, states = tmp_path / "day.json", list[str](), {"kernels": "cut after 3 s"}

    def run(name: str, dry: bool, seconds: float) -> gpu_day.Results:
        assert seconds <= gpu_day.CAPS[name]
        ran.append(name)
        return {"state": states.get(name, "ok"), "seconds": 1.0, "rows": [{"x": 1}], "log": ""}

    def call(*options: str) -> tuple[int, list[str]]:
        ran.clear()
        return gpu_day.main(["--dry", "--json", str(file), *options]), list(ran)

    monkeypatch.setattr(gpu_day, "run_stage", run)
    assert call("--only", "smoke", "kernels") == (1, ["smoke", "kernels"])
    states.clear()
    assert call("--only", "smoke", "kernels") == (0, ["kernels"])
    assert call("--only", "smoke", "--again") == (0, ["smoke"])
    assert call("--seconds", "5") == (1, [])
    assert call() == (0, [name for name in gpu_day.CAPS if name not in ("smoke", "kernels")])
    assert [*json.loads(file.read_text())["figures"]] == sorted(gpu_day.CAPS)


def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="2"):
        gpu_day.main([])
    assert "torch sees no GPU here; --dry tries everything on the CPU" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("intervals", "share"),
    [([(0, 10)], 0), ([(0, 4), (6, 10)], 0.2), ([(6, 10), (0, 4), (1, 3), (3, 5)], 0.1), ([(2, 4), (2, 12)], 0)],
)
def test_the_idle_share_is_what_no_kernel_covers(intervals: list[tuple[float, float]], share: float) -> None:
    assert idle_share(intervals) == pytest.approx(share)

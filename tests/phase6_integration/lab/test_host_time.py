"""The host time lab, in a process of its own: a driver for Triton cannot be taken back."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.mark.slow  # compiles the kernels of a step, unless Triton's cache has them
def test_the_command_counts_the_launches_of_each_step_and_times_them(tmp_path: Path) -> None:
    file, layers = tmp_path / "figures.json", 2
    command = [sys.executable, "-m", "phase6_integration.lab", "host_time", "--models", "8b", "--layers", f"{layers}"]
    done = subprocess.run([*command, "--rounds", "2", "--json", file], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    figures = json.loads(file.read_text())["figures"]
    assert list(figures) == ["8b_decode_1", "8b_decode_256", "8b_mixed", "8b_mixed_512"]
    for name, row in figures.items():
        launches = {kernel: count for kernel, count in row["launches"].items() if count >= layers}
        assert launches.pop("prefill_kernel", 0) == layers * ("mixed" in name)
        assert launches == {
            "GEMM": 4 * layers + 1,
            "add_norm_kernel": 2 * layers + 1,
            "rotate_store_kernel": layers,
            "decode_kernel": layers,
            "join_kernel": layers,
            "swiglu_kernel": layers,
        }
        assert row["launches_of_triton"] == sum(row["launches"].values()) - 4 * layers - 1
        assert 0 < row["host_ms"]["best"] <= row["host_ms"]["median"] <= row["host_ms"]["p90"]
        assert 0 < row["launch_us"]["best"] * row["launches_of_triton"] < 1e3 * row["host_ms"]["p90"]

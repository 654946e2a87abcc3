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
    command = [sys.executable, "-m", "phase6_integration.lab", "host_time", "--models", "596m", "--layers", f"{layers}"]
    done = subprocess.run([*command, "--rounds", "2", "--json", file], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    figures = json.loads(file.read_text())["figures"]
    cases = "decode_1", "decode_256", "mixed", "mixed_pieces", "mixed_512", "mixed_512_pieces"
    assert list(figures) == [f"596m_{case}" for case in cases]
    for name, row in figures.items():
        launches = {kernel: count for kernel, count in row["launches"].items() if count >= layers}
        attention = {"decode_kernel": layers, "join_kernel": layers}
        if "mixed" in name:
            attention["prefill_kernel"] = layers
        if "pieces" in name:  # behind the last attention, the layer's other products and the head
            assert launches == {**attention, "GEMM": 4, "graph": layers, "add_norm_kernel": 2}
        else:
            assert launches == {
                **attention,
                "GEMM": 4 * layers + 1,
                "add_norm_kernel": 2 * layers + 1,
                "rotate_store_kernel": layers,
                "swiglu_kernel": layers,
            }
        others = sum(count for kernel, count in row["launches"].items() if kernel in ("GEMM", "graph"))
        assert row["launches_of_triton"] == sum(row["launches"].values()) - others
        assert 0 < row["host_ms"]["best"] <= row["host_ms"]["median"] <= row["host_ms"]["p90"]
        assert 0 < row["launch_us"]["best"] * row["launches_of_triton"] < 1e3 * row["host_ms"]["p90"]

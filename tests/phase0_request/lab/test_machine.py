"""The machine's description in a result file."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from phase0_request.lab.record import commit, record, without_folders
from phase0_request.support.machine import cpu, describe, vectors


def fake_nvidia_smi(folder: Path, output: str, code: int = 0) -> None:
    script = folder / "nvidia-smi"
    script.write_text(f"#!/bin/sh\nprintf '%s\\n' '{output}'\nexit {code}\n")
    script.chmod(0o755)


@pytest.mark.parametrize(
    ("flags", "held", "words"),
    [
        ("flags\t: fpu avx2 avx512f avx512_bf16 amx_bf16 amx_tile", None, "AMX with bfloat16"),
        ("flags\t: fpu avx2 avx512f avx512_bf16", None, "AVX-512 with bfloat16"),
        ("flags\t: fpu avx2 avx512f avx512_bf16", "haswell", "AVX-512 with bfloat16, held to haswell"),
        ("flags\t: fpu avx2 avx512f", None, "AVX-512 without bfloat16"),
        ("flags\t: fpu avx2", None, "AVX2 without bfloat16"),
        ("Features\t: asimd bf16", None, "NEON with bfloat16"),
        ("flags\t: fpu", None, None),
        ("isa\t: rv64imafdcv", None, None),
    ],
)
def test_processors_of_one_name_differ_in_vector_instructions_and_bfloat16(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: str, held: str | None, words: str | None
) -> None:
    monkeypatch.setenv("NUMBA_CPU_NAME", held or "haswell")
    monkeypatch.setenv("NUMBA_CPU_FEATURES", "+avx2" if held else "")  # without it, numba takes the machine's
    (tmp_path / "cpuinfo").write_text(f"processor\t: 0\n{flags}\nbogomips\t: 1\n")
    assert vectors(tmp_path / "cpuinfo") == words
    assert vectors(tmp_path / "none") is None


@pytest.mark.parametrize(
    ("reported", "name"),
    [
        ("cpu family\t: 25\nmodel\t\t: 17\nmodel name\t: AMD EPYC", "AMD EPYC (family 25 model 17)"),
        ("cpu family\t: 26\nmodel\t\t: 2\nmodel name\t: AMD EPYC", "AMD EPYC (family 26 model 2)"),
        ("model name\t: ARMv8 Processor rev 1 (v8l)", "ARMv8 Processor rev 1 (v8l)"),
    ],
)
def test_processors_of_one_name_differ_in_family_and_model(tmp_path: Path, reported: str, name: str) -> None:
    (tmp_path / "cpuinfo").write_text("".join(f"processor\t: {number}\n{reported}\n\n" for number in range(2)))
    assert cpu(tmp_path / "cpuinfo") == name
    assert cpu(tmp_path / "none")


@pytest.mark.parametrize(
    ("output", "code", "gpu", "memory"),
    [
        ("NVIDIA H200, 143771\nNVIDIA H200, 143771", 0, "NVIDIA H200", 143771 * 2**20),
        ("NVIDIA GB10, [N/A]", 0, "NVIDIA GB10", None),
        ("No devices were found", 6, None, None),
    ],
)
def test_the_gpu_is_what_nvidia_smi_lists_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, output: str, code: int, gpu: str | None, memory: int | None
) -> None:
    fake_nvidia_smi(tmp_path, output, code)
    monkeypatch.setenv("PATH", str(tmp_path))
    machine = describe()
    assert (machine.gpu, machine.gpu_memory_bytes) == (gpu, memory)


def test_a_record_holds_all_that_figures_depend_on(tmp_path: Path) -> None:
    path = tmp_path / "results" / "a.json"
    record(path, "python -m phase0_request --out /home/someone/a.json", {"us": 1.5, "many": [1, 2]}, device="pencil")
    text = path.read_text()
    result = json.loads(text)
    assert text == json.dumps(result, indent=2, sort_keys=True, ensure_ascii=False) + "\n"
    assert sorted(result) == ["command", "commit", "date", "device", "figures", "machine", "versions"]
    assert (result["machine"]["cpu"], result["machine"]["vectors"]) == (cpu(), vectors())
    assert result["figures"] == {"us": 1.5, "many": [1, 2]}
    assert result["device"] == "pencil"
    assert result["command"] == "python -m phase0_request --out a.json"
    assert "someone" not in text
    assert str(tmp_path) not in text
    assert str(Path.home()) not in text
    record(path, "again", {})
    assert json.loads(path.read_text())["device"] in (describe().gpu, describe().cpu)


@pytest.mark.parametrize(
    ("command", "shown"),
    [
        ("python -m bench --tokens 1/2", "python -m bench --tokens 1/2"),
        ("python /opt/x/bench.py --model=/models/qwen", "python bench.py --model=qwen"),
        (
            "bench --model ~/models/qwen --url http://127.0.0.1:8000/v1",
            "bench --model qwen --url http://127.0.0.1:8000/v1",
        ),
        ("bench --model 'C:\\models\\qwen' org/model", "bench --model 'qwen' org/model"),
    ],
)
def test_folders_are_cut_from_commands(command: str, shown: str) -> None:
    assert without_folders(command) == shown


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
def test_the_commit_says_whether_files_differ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("GIT_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", os.devnull)
    monkeypatch.setenv("GIT_CONFIG_SYSTEM", os.devnull)

    def git(*arguments: str) -> str:
        identity = ("-c", "user.name=A", "-c", "user.email=a@example.org")
        command = ["git", "-C", str(tmp_path), *identity, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    assert commit(tmp_path) is None
    git("init", "-q")
    assert commit(tmp_path) is None
    (tmp_path / "a.py").write_text("1\n")
    git("add", "a.py")
    git("commit", "-q", "-m", "one")
    head = git("rev-parse", "HEAD")
    assert commit(tmp_path) == head
    (tmp_path / "chapters/results").mkdir(parents=True)
    (tmp_path / "chapters/results/a.json").write_text("{}\n")
    assert commit(tmp_path) == head
    (tmp_path / "a.py").write_text("2\n")
    assert commit(tmp_path) == f"{head}-dirty"
    (tmp_path / "inner").mkdir()
    assert commit(tmp_path / "inner") is None

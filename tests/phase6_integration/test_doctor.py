"""The doctor: each check on machines that are not this one, and all of them on this one."""

import dataclasses
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from phase0_request import machine
from phase0_request.lab.corpus import facts
from phase0_request.machine import Machine
from phase6_integration.cli import checks
from phase6_integration.cli.checks import Cuda, Finding, State

DOCTOR = [sys.executable, "-m", "phase6_integration.cli", "doctor"]
VERSIONS = {"torch": "2.11.0", "transformers": "5.17.0", "tokenizers": "0.23.2", "triton": "3.6.0"}
HERE = Machine(
    cpu="a processor", cores=8, memory_bytes=64 << 30, gpu=None, gpu_memory_bytes=None, python="3.12.1",
    platform="Linux x86_64", versions=VERSIONS,
)  # fmt: skip
WITH_GPU = dataclasses.replace(HERE, gpu="a GPU", gpu_memory_bytes=80 << 30)


def test_a_package_that_is_missing_is_a_fault_and_triton_a_warning() -> None:
    assert checks.packages(VERSIONS).state is State.OK
    without = checks.packages({name: version for name, version in VERSIONS.items() if name != "torch"})
    assert (without.state, without.words) == (State.FAULT, "torch not installed")
    assert "pip install" in without.advice
    assert checks.packages({n: v for n, v in VERSIONS.items() if n != "triton"}).state is State.WARNING


@pytest.mark.parametrize(
    ("flags", "cores", "state", "words"),
    [
        ("flags\t: fpu avx2 avx512_bf16 amx_bf16 amx_tile", 8, State.OK, "8 cores, AMX and AVX512-BF16"),
        ("Features\t: asimd bf16", 4, State.OK, "4 cores, BF16"),
        ("flags\t: fpu avx2", 8, State.WARNING, "8 cores"),
        ("flags\t: fpu avx512_bf16", 1, State.WARNING, "1 cores, AVX512-BF16"),
    ],
)
def test_a_processor_is_known_by_its_flags(tmp_path: Path, flags: str, cores: int, state: State, words: str) -> None:
    (tmp_path / "cpuinfo").write_text(f"processor\t: 0\n{flags}\nbogomips\t: 1\n")
    found = checks.processor(dataclasses.replace(HERE, cores=cores), tmp_path / "cpuinfo")
    assert (found.state, found.words) == (state, f"a processor, {words}")
    assert bool(found.advice) == (state is not State.OK)


def test_little_memory_is_a_warning() -> None:
    assert checks.memory(8 << 30) == Finding(State.OK, "memory", "8.0 GiB free")
    assert checks.memory(1 << 30).state is State.WARNING
    assert "--kv-cache-pages" in checks.memory(None).advice


def test_a_gpu_must_be_one_that_torch_can_use() -> None:
    assert checks.gpu(HERE, Cuda(None)).state is State.OK
    assert "built for CUDA" in checks.gpu(WITH_GPU, Cuda(None)).advice
    assert "CUDA 13.0" in checks.gpu(WITH_GPU, Cuda("13.0")).advice
    assert checks.gpu(WITH_GPU, Cuda("13.0", 79 << 30)).words == "a GPU, 79.0 of 80 GiB free"
    assert checks.gpu(WITH_GPU, Cuda("13.0", 9 << 30)).state is State.WARNING


def test_a_port_that_is_taken_is_a_warning() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        number = taken.getsockname()[1]
        found = checks.port(number)
        assert (found.state, found.words) == (State.WARNING, f"{number} cannot be had: Address already in use")
    assert checks.port(number).state is State.OK


def test_a_model_that_says_something_else_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "QUESTION", "What is a page table?")
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)  # for the tests after this
    right = checks.model()
    assert right.state is State.OK
    one = next(fact for fact in facts.read() if "What is a page table?" in fact.questions)
    monkeypatch.setattr(facts, "read", lambda: (dataclasses.replace(one, answer="It is something else."),))
    wrong = checks.model()
    assert wrong.state is State.FAULT
    assert one.answer in wrong.words
    assert "It is something else." in wrong.words


def test_a_check_that_fails_is_a_fault_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> Finding:
        raise RuntimeError("no such file")

    monkeypatch.setattr(checks, "model", broken)
    found = list(checks.findings(HERE))
    (fault,) = [one for one in found if one.state is State.FAULT]
    assert (fault.name, fault.words) == ("model", "the check failed: RuntimeError: no such file")
    assert [one.name for one in found][-1] == "port"


def test_the_command_says_what_this_machine_has_and_fails_only_on_a_fault() -> None:
    done = subprocess.run(DOCTOR, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    assert "\x1b" not in done.stdout
    found = dict(re.findall(r"^(?:ok|warning) +(\S+) +(.*)$", done.stdout, re.MULTILINE))
    assert list(found) == ["Python", "packages", "processor", "memory", "GPU", "model", "kernels", "port"]
    here = machine.describe()
    assert found["Python"].startswith(here.python)
    assert f"torch {here.versions['torch']}" in found["packages"]
    assert f"{here.cores} cores" in found["processor"]
    assert "answers rightly" in found["model"]

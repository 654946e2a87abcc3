"""`nanoserve doctor`: single checks for other machines, and the whole command on this one."""

import dataclasses
import re
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from chapters.tiny_chat import corpus as facts
from phase0_request.support import machine
from phase0_request.support.machine import Machine
from phase6_integration.cli import doctor_command as doctor
from phase6_integration.cli.main import main
from phase6_integration.support import machine_checks
from phase6_integration.support.machine_checks import Problem, State

VERSIONS = {"torch": "2.11.0", "transformers": "5.17.0", "tokenizers": "0.23.2", "triton": "3.6.0"}
HERE = Machine(
    cpu="a processor", cores=8, memory_bytes=64 << 30, gpu=None, gpu_memory_bytes=None, python="3.12.1",
    platform="Linux x86_64", versions=VERSIONS,
)  # fmt: skip
WITH_GPU = dataclasses.replace(HERE, gpu="a GPU", gpu_memory_bytes=80 << 30)


def problem(check: Callable[[], str]) -> tuple[State, str]:
    """The state and the words of what a check finds wrong."""
    with pytest.raises(Problem) as found:
        check()
    assert found.value.advice
    return found.value.state, str(found.value)


def test_what_is_missing_or_short_is_a_warning_or_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, state in (("torch", State.FAULT), ("triton", State.WARNING)):
        versions = {other: version for other, version in VERSIONS.items() if other != name}
        assert problem(lambda versions=versions: machine_checks.check_packages(versions))[0] is state
    one_core = dataclasses.replace(HERE, cores=1)
    assert problem(lambda: machine_checks.check_processor(one_core))[0] is State.WARNING
    for free in (1 << 30, None):
        monkeypatch.setattr("phase0_request.support.memory.free_on_cpu", lambda free=free: free)
        assert problem(machine_checks.check_memory)[0] is State.WARNING
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert problem(lambda: machine_checks.check_gpu(WITH_GPU)) == (State.WARNING, "a GPU, and torch cannot use it")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (9 << 30, 80 << 30))
    assert problem(lambda: machine_checks.check_gpu(WITH_GPU))[0] is State.WARNING


def test_on_a_gpu_what_triton_lacks_to_compile_its_launcher_is_a_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Programs are looked for on the path, headers in a folder; both are made up."""
    programs, headers = tmp_path / "bin", tmp_path / "include"
    programs.mkdir()
    headers.mkdir()
    monkeypatch.setenv("PATH", str(programs))
    monkeypatch.delenv("CC", raising=False)
    missing = "missing: Triton, a C compiler (gcc or clang), Python's headers (Python.h)"
    assert problem(lambda: machine_checks.check_triton({}, headers)) == (State.FAULT, missing)
    (headers / "Python.h").touch()
    for name in ("clang", "gcc"):
        (programs / name).write_text("#!/bin/sh")
        (programs / name).chmod(0o755)
        assert machine_checks.check_triton(VERSIONS, headers) == f"3.6.0, compiles with {programs / name}"
    monkeypatch.setenv("CC", "cc-that-is-not-there")
    assert problem(lambda: machine_checks.check_triton(VERSIONS, headers))[0] is State.FAULT


def test_a_port_in_use_is_a_warning() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        number = taken.getsockname()[1]
        words = f"{number} is not available: Address already in use"
        assert problem(lambda: doctor.check_port(number)) == (State.WARNING, words)
    assert doctor.check_port(number) == f"{number} is free"


def test_a_wrong_answer_of_the_model_and_a_check_that_raises_are_faults_and_the_others_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (answer,) = (fact.answer for fact in facts.read() if machine_checks.QUESTION in fact.questions)
    assert answer == machine_checks.ANSWER
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)  # for the tests after this
    monkeypatch.setattr(machine_checks, "ANSWER", "It is something else.")

    def broken() -> str:
        raise RuntimeError("no such file")

    found = list(machine_checks.findings(HERE, {"broken": broken, "port": lambda: "free"}))
    wrong, raised = (finding for finding in found if finding.state is State.FAULT)
    assert answer in wrong.words
    assert "It is something else." in wrong.words
    assert (raised.name, raised.words) == ("broken", "the check failed: RuntimeError: no such file")
    assert found[-1] == machine_checks.Finding(State.OK, "port", "free")
    assert "Triton" not in [finding.name for finding in found], "there is no GPU"


def test_the_command_reports_every_check_and_exits_0_without_faults(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)  # for the tests after this
    assert main(["doctor"]) == 0
    shown, errors = capsys.readouterr()
    assert all(line.startswith("compiling") for line in errors.splitlines())
    assert "\x1b" not in shown
    found = dict(re.findall(r"^(?:ok|warning) +(\S+) +(.*)$", shown, re.MULTILINE))
    here = machine.describe()
    names = ["Python", "packages", "processor", "memory", "GPU", "Triton", "model", "kernels", "port"]
    assert list(found) == [name for name in names if name != "Triton" or here.gpu is not None]
    assert f"torch {here.versions['torch']}" in found["packages"]
    assert "answers correctly" in found["model"]

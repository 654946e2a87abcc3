"""`nanoserve doctor`: single checks for other machines, and the whole command on this one."""

import dataclasses
import re
import socket
from pathlib import Path
from typing import Any

import pytest
import torch

from chapters.tiny_chat import corpus as facts
from phase0_request import machine
from phase0_request.machine import Machine
from phase0_request.request import TokenLogprobs
from phase6_integration.cli import doctor_command as doctor
from phase6_integration.cli.main import main
from phase6_integration.engine import machine_checks
from phase6_integration.engine.engine import NanoServingEngine
from phase6_integration.engine.machine_checks import Finding, State
from phase6_integration.process.health import Health
from tests.phase6_integration.fake_engine import FakeEngine, served
from tests.phase6_integration.scripted import in_a_thread, said

VERSIONS = {"torch": "2.11.0", "transformers": "5.17.0", "tokenizers": "0.23.2", "triton": "3.6.0"}
HERE = Machine(
    cpu="a processor", cores=8, memory_bytes=64 << 30, gpu=None, gpu_memory_bytes=None, python="3.12.1",
    platform="Linux x86_64", versions=VERSIONS,
)  # fmt: skip
WITH_GPU = dataclasses.replace(HERE, gpu="a GPU", gpu_memory_bytes=80 << 30)


def test_a_missing_package_is_a_fault_and_missing_triton_a_warning() -> None:
    assert machine_checks.check_packages(VERSIONS).state is State.OK
    without = machine_checks.check_packages({name: version for name, version in VERSIONS.items() if name != "torch"})
    assert (without.state, without.words) == (State.FAULT, "torch not installed")
    assert "pip install" in without.advice
    assert machine_checks.check_packages({n: v for n, v in VERSIONS.items() if n != "triton"}).state is State.WARNING


def test_one_core_is_a_warning_and_no_bfloat16_is_not() -> None:
    """float32 takes twice the memory, and a single request waits for twice the bytes."""
    for cores, state in ((1, State.WARNING), (8, State.OK)):
        found = machine_checks.check_processor(dataclasses.replace(HERE, cores=cores, vectors="AVX2 without bfloat16"))
        assert (found.state, found.words) == (state, f"a processor, {cores} cores, AVX2 without bfloat16")
        assert "float32" not in found.advice


def test_low_memory_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    for free, state in ((8 << 30, State.OK), (1 << 30, State.WARNING), (None, State.WARNING)):
        monkeypatch.setattr("phase1_kv_pool.memory.free_on_cpu", lambda free=free: free)
        assert machine_checks.check_memory().state is state


def test_a_gpu_that_torch_cannot_use_or_that_is_full_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert machine_checks.check_gpu(HERE).state is State.OK
    for built, supported, advice in (
        (None, "12.4", "install a torch built for CUDA"),
        ("13.0", None, "the driver must support CUDA 13.0"),
        ("13.0", "12.4", "must support CUDA 13.0, and supports 12.4: update it, or install a torch for that CUDA"),
    ):
        monkeypatch.setattr(torch.version, "cuda", built)
        monkeypatch.setattr(machine_checks, "driver_cuda", lambda supported=supported: supported)
        assert machine_checks.check_gpu(WITH_GPU).advice.endswith(advice)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for free, state in ((79 << 30, State.OK), (9 << 30, State.WARNING)):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda free=free: (free, 80 << 30))
        assert machine_checks.check_gpu(WITH_GPU).state is state


def test_on_a_gpu_what_triton_lacks_to_compile_its_launcher_is_a_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Programs are looked for on the path, headers in a folder; both are made up."""
    programs, headers = tmp_path / "bin", tmp_path / "include"
    programs.mkdir()
    headers.mkdir()
    monkeypatch.setenv("PATH", str(programs))
    monkeypatch.delenv("CC", raising=False)
    found = machine_checks.check_triton({}, headers)
    assert found.state is State.FAULT
    assert found.words == "missing: Triton, a C compiler (gcc or clang), Python's headers (Python.h)"
    assert "gcc and python3-dev" in found.advice
    (headers / "Python.h").touch()
    assert machine_checks.check_triton(VERSIONS, headers).words == "missing: a C compiler (gcc or clang)"
    for name in ("clang", "gcc"):
        (programs / name).write_text("#!/bin/sh")
        (programs / name).chmod(0o755)
        assert machine_checks.check_triton(VERSIONS, headers).words == f"3.6.0, compiles with {programs / name}"
    monkeypatch.setenv("CC", "cc-that-is-not-there")
    assert machine_checks.check_triton(VERSIONS, headers).state is State.FAULT


def test_triton_is_checked_only_where_there_is_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_checks, "check_model", lambda: Finding(State.OK, "model", ""))
    for here, checked in ((HERE, False), (WITH_GPU, True)):
        assert ("Triton" in [one.name for one in machine_checks.findings(here)]) == checked


def test_the_cuda_of_a_driver_is_read_from_its_library(monkeypatch: pytest.MonkeyPatch) -> None:
    class Driver:
        def cuDriverGetVersion(self, version: Any) -> int:  # noqa: N802
            version._obj.value = 12_040
            return 0

    def missing(name: str) -> Any:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(machine_checks.ctypes, "CDLL", lambda name: Driver())
    assert machine_checks.driver_cuda() == "12.4"
    monkeypatch.setattr(machine_checks.ctypes, "CDLL", missing)
    assert machine_checks.driver_cuda() is None


def test_a_port_in_use_is_a_warning() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        number = taken.getsockname()[1]
        found = doctor.check_port(number)
        assert (found.state, found.words) == (State.WARNING, f"{number} is not available: Address already in use")
    assert doctor.check_port(number).state is State.OK


@pytest.mark.parametrize("health", [Health.READY, Health.LOADING])
def test_a_server_of_ours_on_the_port_is_named_and_no_warning(health: Health) -> None:
    def engine() -> FakeEngine:
        fake = FakeEngine()
        fake.health = health
        return fake

    with served(engine) as url:
        found = doctor.check_port(int(url.rpartition(":")[2]))
    assert found.state is State.OK
    assert re.search(rf"is that of a nano-serving server, version [\d.]+, which is {health.value}$", found.words)


def test_a_server_of_others_on_the_port_is_a_warning() -> None:
    """It has one of the routes, as vLLM and llama.cpp have."""
    for path, content in (("/version", {"version": "0.11.0"}), ("/health", {"status": "ok"})):
        with in_a_thread(
            lambda heard, path=path, content=content: said(content) if heard.path == path else None
        ) as one:
            assert doctor.check_port(int(one.url.rpartition(":")[2])).state is State.WARNING


def test_a_wrong_answer_of_the_model_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    (answer,) = (fact.answer for fact in facts.read() if machine_checks.QUESTION in fact.questions)
    assert answer == machine_checks.ANSWER
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)  # for the tests after this
    monkeypatch.setattr(machine_checks, "ANSWER", "It is something else.")
    wrong = machine_checks.check_model()
    assert wrong.state is State.FAULT
    assert answer in wrong.words
    assert "It is something else." in wrong.words


@pytest.mark.parametrize(("behind", "state"), [(0.1, State.OK), (1.0, State.FAULT)])
def test_another_token_is_a_fault_unless_the_expected_one_is_about_as_likely(
    behind: float, state: State, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The third token of the answer is another one than in the corpus, by so much more likely."""
    generate = NanoServingEngine.generate

    def flipped(self: NanoServingEngine, *arguments: Any, **options: Any) -> Any:
        (answer,) = generate(self, *arguments, **options)
        tokens = answer.request.output_tokens
        answer.logprobs[2] = TokenLogprobs(-0.5, ((7, -0.5), (tokens[2], -0.5 - behind)))
        tokens[2], answer.text = 7, "A KV store."
        return [answer]

    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)  # for the tests after this
    monkeypatch.setattr(NanoServingEngine, "generate", flipped)
    found = machine_checks.check_model()
    assert found.state is state
    assert ("up to rounding" in found.words) == (state is State.OK)


def test_a_check_that_raises_is_a_fault_and_the_others_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> Finding:
        raise RuntimeError("no such file")

    monkeypatch.setattr(machine_checks, "check_model", broken)
    found = list(machine_checks.findings(HERE, {"port": doctor.check_port}))
    (fault,) = [one for one in found if one.state is State.FAULT]
    assert (fault.name, fault.words) == ("model", "the check failed: RuntimeError: no such file")
    assert [one.name for one in found][-1] == "port"


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
    assert found["Python"].startswith(here.python)
    assert f"torch {here.versions['torch']}" in found["packages"]
    assert f"{here.cores} cores" in found["processor"]
    assert "answers correctly" in found["model"]

"""Kernels are compiled before they are needed: in other processes, with a word on how far that is."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from phase2_prefill_decode.kernels.cpu import compilation
from phase2_prefill_decode.kernels.cpu.compilation import KERNELS, Kernel, compile_kernels, kernels_of

HERE = Kernel("swiglu", "float32"), Kernel("norm", "float32")


def test_only_the_kernels_of_a_model_are_compiled() -> None:
    """Logits that are edited are float32; a large model has no step in one call."""
    assert kernels_of(torch.float32, forward=False) == [
        Kernel(name, "float32") for name in KERNELS if name != "forward"
    ]
    small = kernels_of(torch.bfloat16, forward=True)
    assert sorted(small) == sorted([*(Kernel(name, "bfloat16") for name in KERNELS), Kernel("sampling", "float32")])
    assert small[0].name == "attention", "the longest is not the last to begin"


def test_kernels_are_compiled_in_other_processes_and_one_that_fails_there_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(compilation, "cores", lambda: 2)
    said = list(compilation._in_processes([Kernel("swiglu", "float32"), Kernel("norm", "complex64")]))
    assert said[0] == (0, "swiglu, norm")
    assert said[-1] in [(0, "swiglu"), (1, "norm")], "one that has failed is not done"
    assert [file.name for file in tmp_path.rglob("*.nbc") if "swiglu" in file.name]
    assert not [file.name for file in tmp_path.rglob("*.nbc") if "norm" in file.name]


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[Kernel]:
    """The kernels that are compiled, none of them in truth."""
    made: list[Kernel] = []
    monkeypatch.setattr(compilation, "cores", lambda: 1)
    monkeypatch.setattr(Kernel, "make", lambda kernel: made.append(kernel))
    return made


def test_what_the_cache_does_not_hold_is_compiled_and_how_far_that_is_is_logged(
    compiled: list[Kernel], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Kernel, "is_cached", lambda kernel: False)
    with caplog.at_level(logging.INFO):
        compile_kernels(HERE)
    assert set(compiled) == set(HERE)
    assert [record.message.partition("once, ")[2] for record in caplog.records] == [
        "0 of 2 done, now swiglu",
        "1 of 2 done, now norm",
    ]


def test_nothing_is_compiled_or_said_if_the_cache_holds_all(
    compiled: list[Kernel], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Kernel, "is_cached", lambda kernel: True)
    with caplog.at_level(logging.INFO):
        compile_kernels(HERE)
    assert (compiled, caplog.records) == ([], [])


def test_without_a_writable_cache_kernels_are_compiled_in_this_process(
    compiled: list[Kernel], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: Any) -> Any:
        raise AssertionError("another process could not pass them on")

    monkeypatch.setattr(compilation, "cores", lambda: 8)
    monkeypatch.setattr(compilation, "is_writable", lambda: False)
    monkeypatch.setattr(compilation, "_in_processes", refuse)
    compile_kernels(HERE)
    assert set(compiled) == set(HERE)

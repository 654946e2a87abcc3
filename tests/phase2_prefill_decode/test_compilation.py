"""Kernels are compiled before they are needed: in other processes, with a word on how far that is."""

from pathlib import Path

import pytest
import torch

from phase2_prefill_decode.extras.cpu import compilation
from phase2_prefill_decode.extras.cpu.cache import PLACE, not_kept
from phase2_prefill_decode.extras.cpu.compilation import KERNELS, Kernel, compile_kernels, kernels_of


def test_only_the_kernels_of_a_model_are_compiled() -> None:
    """Logits that are edited are float32; quantized weights have a product of their own."""
    assert kernels_of(torch.float32, forward=False) == [
        Kernel(name, "float32") for name in KERNELS if name != "forward"
    ]
    whole = kernels_of(torch.bfloat16, True, {torch.bfloat16})
    assert sorted(whole) == sorted([*(Kernel(name, "bfloat16") for name in KERNELS), Kernel("sampling", "float32")])
    assert whole[0].name == "attention", "the longest is not the last to begin"
    quantized = {*kernels_of(torch.bfloat16, True, {torch.bfloat16, torch.int8})} - {*whole}
    assert quantized == {Kernel("product", "bfloat16", "int8")}
    in_8_bits = {*kernels_of(torch.bfloat16, True, {torch.bfloat16}, torch.int8)} - {*whole}
    assert in_8_bits == {Kernel(name, "bfloat16", "", "int8") for name in ("attention", "rotation", "forward")}


def test_kernels_are_compiled_in_other_processes_and_one_that_fails_there_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(compilation, "cores", lambda: 2)
    done = list(compilation._in_processes([Kernel("rotation", "float32"), Kernel("sampling", "complex64")]))
    assert done == [Kernel("rotation", "float32")]
    assert [file.name for file in tmp_path.rglob("*.nbc") if "rotate_store" in file.name]
    assert not [file.name for file in tmp_path.rglob("*.nbc") if "draw" in file.name]


def test_a_place_that_takes_no_kernels_is_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A disk without room for a directory, or an installation of another user: each start compiles."""
    monkeypatch.setattr(compilation, "is_writable", lambda: False)
    not_kept.cache_clear()
    compile_kernels([])
    not_kept.cache_clear()
    (warning,) = (record.message for record in caplog.records if record.levelname == "WARNING")
    assert f"cannot be kept in {PLACE}" in warning

"""What is compiled for the CPU: where it is kept, what it is kept by, and that it runs where nothing can be kept."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
import numpy as np
import pytest
import torch

from phase2_prefill_decode.kernels import pointwise, pointwise_cpu, threads_cpu
from phase2_prefill_decode.kernels.numbers_cpu import PLACE, compiled, has_kept, place


def test_what_is_kept_is_forgotten_when_any_file_of_the_kernels_changes(tmp_path: Path) -> None:
    """numba itself looks at the file of the kernel alone, not at those of the functions that it calls."""
    for name in ("attention_cpu.py", "numbers_cpu.py", "other.py"):
        (tmp_path / name).write_text("1")
    before = place(tmp_path)
    (tmp_path / "other.py").write_text("2")
    assert place(tmp_path) == before
    (tmp_path / "numbers_cpu.py").write_text("2")
    assert place(tmp_path) != before
    assert place(tmp_path).parent == before.parent == tmp_path / "__pycache__"


def test_it_is_kept_at_home_where_it_cannot_be_beside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    assert place(tmp_path).parent == tmp_path / "home" / "numba"
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path / "given"))
    assert place(tmp_path).parent == tmp_path / "given"


def test_every_kernel_is_kept_in_that_place() -> None:
    given = numba.config.CACHE_DIR
    made = compiled()(lambda x: x + 1)
    assert PLACE in Path(made.stats.cache_path).parents
    assert given == numba.config.CACHE_DIR, "other users of numba have theirs"
    pointwise_cpu.swiglu(torch.ones(1, 16))
    assert has_kept()


def refuses_to_keep(make: Callable[..., Any]) -> Callable[..., Any]:
    def make_or_refuse(*arguments: Any, cache: bool, **options: Any) -> Any:
        if cache:
            raise RuntimeError("cannot cache function: no locator available")
        return make(*arguments, **options)

    return make_or_refuse


def test_kernels_run_where_nothing_can_be_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numba, "njit", refuses_to_keep(numba.njit))
    monkeypatch.setattr(numba, "cfunc", refuses_to_keep(numba.cfunc))
    assert compiled()(lambda x: x + 1)(np.float32(2)) == 3
    body = pointwise_cpu.swiglu_body.__wrapped__(torch.float32)
    monkeypatch.setattr(pointwise_cpu, "swiglu_body", lambda dtype: body)
    x = torch.randn(40, 32, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(pointwise_cpu.swiglu(x), pointwise.SWIGLU.load("reference")(x))


def test_without_an_openmp_library_one_thread_does_it_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call to address 0 would end the process."""
    for module in (threads_cpu, pointwise_cpu):
        monkeypatch.setattr(module, "OPENMP", 0)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    assert threads_cpu.threads_for(1e9) == 1
    x = torch.randn(2000, 64, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(pointwise_cpu.swiglu(x), pointwise.SWIGLU.load("reference")(x))


def test_where_torch_has_no_such_library_the_address_is_0(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> None:
        raise OSError(f"{name}: no such file")

    assert threads_cpu._openmp() == threads_cpu.OPENMP
    monkeypatch.setattr("ctypes.CDLL", refuse)
    assert threads_cpu._openmp() == 0

"""The cache of compiled CPU kernels: where it is, what invalidates it, and that kernels run without it."""

import os
import sys
from collections.abc import Callable
from contextlib import ExitStack
from errno import ENOSPC
from pathlib import Path
from subprocess import PIPE, Popen
from typing import Any

import numba
import numpy as np
import pytest
import torch
from numba.np.unsafe.ndarray import to_fixed_tuple

from phase2_prefill_decode.extras.cpu import openmp
from phase2_prefill_decode.extras.cpu.cache import PLACE, Files, not_kept, place
from phase2_prefill_decode.extras.cpu.intrinsics import FEATURES, array, compiled, kernel
from phase2_prefill_decode.extras.cpu.microkernel import SET, WIDE
from phase2_prefill_decode.extras.cpu.openmp import take

ROOT = Path(__file__).parents[2]
INT64 = np.dtype(np.int64)


def test_any_change_of_a_kernel_file_invalidates_the_cache(tmp_path: Path) -> None:
    """numba itself checks only the file of the kernel, not those of the functions that it calls."""
    for name in ("attention.py", "intrinsics.py"):
        (tmp_path / name).write_text("1")
    before = place(tmp_path)
    (tmp_path / "other.txt").write_text("2")
    assert place(tmp_path) == before
    (tmp_path / "intrinsics.py").write_text("2")
    assert place(tmp_path) != before
    assert place(tmp_path).parent == before.parent == tmp_path / "__pycache__"


def test_the_cache_is_in_the_home_directory_if_the_sources_are_read_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    assert place(tmp_path).parent == tmp_path / "home" / "numba"
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "given"))
    assert place(tmp_path).parent == tmp_path / "given"


def test_kernels_use_the_instructions_that_numba_is_told() -> None:
    """`make test-avx2` tells numba and torch to use none of AVX-512. The name of a processor is not enough for
    numba: without a list of features it takes those of the machine."""

    def scale(x: Any) -> None:
        for i in range(len(x)):
            x[i] *= 2

    made = numba.njit(scale)
    made(np.ones(64, np.float32))
    (assembly,) = made.inspect_asm().values()
    assert "zmm" not in assembly or "+avx512f" in FEATURES
    assert ("+avx512f" in FEATURES) == WIDE
    if os.environ.get("NUMBA_CPU_NAME") == "haswell":
        assert SET == "AVX2"
        assert torch.backends.cpu.get_cpu_capability() == "AVX2"


@compiled()
def half(x: int) -> int:
    return x // 2


def test_every_kernel_is_cached() -> None:
    given = numba.config.CACHE_DIR
    made = kernel(lambda x: x + 1)
    assert PLACE in Path(made.stats.cache_path).parents
    assert given == numba.config.CACHE_DIR, "other users of numba have theirs"


def test_a_function_that_kernels_are_made_of_cannot_be_called_from_python() -> None:
    """It has no wrapper for that: the call would end the process."""
    assert kernel(lambda x: half(x))(4) == 2
    with pytest.raises(TypeError, match="half can be called in compiled functions only"):
        half(4)


def test_code_is_found_by_its_function_its_source_and_its_key(tmp_path: Path) -> None:
    Files(str(tmp_path), "function", 0).save("key", "code")
    asked = [("function", 0, "key"), ("other", 0, "key"), ("function", 1, "key"), ("function", 0, "another")]
    assert [Files(str(tmp_path), name, stamp).load(key) for name, stamp, key in asked] == ["code", None, None, None]


def test_a_full_disk_ends_no_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(file: Path, _: bytes) -> int:
        file.touch()  # a name there is room for
        raise OSError(ENOSPC, os.strerror(ENOSPC))

    monkeypatch.setattr(Path, "write_bytes", full)
    not_kept.cache_clear()
    for key in ("one", "other"):
        Files(str(tmp_path / "of a checkout"), "function", 0).save(key, "code")
    not_kept.cache_clear()
    assert not [*tmp_path.iterdir()]
    (record,) = caplog.records
    assert f"cannot be kept in {PLACE}" in record.message
    assert "No space left on device" in record.message


AT_ONCE = """
import sys
import numba
from phase2_prefill_decode.extras.cpu.cache import keeping

def kernel(name, more):
    def body(x):
        return x + more
    kind = getattr(numba.types, name)
    return keeping(lambda cache: numba.cfunc(kind(kind), cache=cache)(body))

for names in ([sys.argv[1]], ["float32", "float64"]):
    input()  # until both have come here
    kernels = [kernel(name, 1 + len(name)) for name in names]
    assert [made.ctypes(2) for made in kernels] == [10] * len(names)
    print([made._cache_hits for made in kernels], flush=True)
"""


def test_two_processes_may_compile_the_same_kernel_at_once(tmp_path: Path) -> None:
    """And each can then run what the other has cached."""
    (tmp_path / "at_once.py").write_text(AT_ONCE)
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    with ExitStack() as ends:
        both = [
            ends.enter_context(
                Popen([sys.executable, tmp_path / "at_once.py", name], env=environment, stdin=PIPE, stdout=PIPE)
            )
            for name in ("float32", "float64")
        ]
        for expected in (b"[0]\n", b"[1, 1]\n"):
            for process in both:
                assert process.stdin
                process.stdin.write(b"\n")
                process.stdin.flush()
            assert [process.stdout.readline() for process in both if process.stdout] == [expected] * 2


def refuses_to_keep(make: Callable[..., Any]) -> Callable[..., Any]:
    def make_or_refuse(*arguments: Any, cache: bool = False, **options: Any) -> Any:
        if cache:
            raise RuntimeError("cannot cache function: no locator available")
        return make(*arguments, **options)

    return make_or_refuse


def number(work: int) -> None:
    _, result, length = to_fixed_tuple(array(work, (3,), INT64), 3)
    numbers = array(result, (length,), INT64)
    item = take(work)
    while item < length:
        numbers[item] += item
        item = take(work)


def assert_runs(threads: int) -> None:
    """Each item of a body is done once."""
    numbers = np.zeros(5000, np.int64)
    openmp.launch(openmp.address_of(number), (numbers.ctypes.data, len(numbers)), threads, openmp.OPENMP)
    assert np.array_equal(numbers, np.arange(5000))


def test_kernels_run_without_a_writable_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numba, "njit", refuses_to_keep(numba.njit))
    monkeypatch.setattr(numba, "cfunc", refuses_to_keep(numba.cfunc))
    assert kernel(lambda x: x + 1)(np.float32(2)) == 3
    assert_runs(threads=2)


def test_without_openmp_kernels_run_on_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call to address 0 would end the process."""
    monkeypatch.setattr(openmp, "OPENMP", 0)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    assert openmp.threads_for(1e9) == 1
    assert_runs(openmp.threads_for(1e9))

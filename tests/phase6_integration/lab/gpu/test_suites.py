"""The stages that run tests: what they select, how a test that hangs ends alone, and what is left of a run."""

import subprocess
from collections import Counter
from importlib.util import find_spec
from pathlib import Path

import pytest

from phase6_integration.lab.gpu import suites

ROOT = Path(__file__).parents[4]


class Collected:
    """A plugin of pytest that keeps what it would run."""

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.tests = Counter(item.nodeid.partition("[")[0] for item in session.items)


def collected(name: str) -> Counter[str]:
    """The cases that a stage would run, by test. In this process, which has imported most of them already."""
    kept, quiet = Collected(), ["--collect-only", "-q", "-p", "no:cacheprovider", "--rootdir", str(ROOT)]
    assert pytest.main([*quiet, *suites.selection(name)], plugins=[kept]) == 0
    return kept.tests


def test_the_cases_of_every_triton_kernel_are_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    cases = collected("suites")
    two = "tests/phase2_prefill_decode"
    least = {
        f"{two}/test_kernels.py::test_the_decode_kernel_takes_a_few_new_tokens_a_sequence": 9,
        f"{two}/test_kernels.py::test_any_split_size_gives_the_same_result": 3,
        f"{two}/test_attention.py::test_paged_attention_matches_contiguous_attention": 90,
        f"{two}/test_pointwise.py::test_q_and_k_are_normed_and_rotated_and_k_and_v_stored": 44,
        f"{two}/test_draw.py::test_every_backend_draws_the_same_tokens": 2,
        f"{two}/test_mask.py::test_excluded_tokens_get_minus_infinity_and_the_others_stay_as_they_are": 10,
        f"{two}/quantized/test_product.py::test_the_product_is_that_of_float64": 120,
        "tests/phase1_kv_pool/test_store.py::test_tokens_are_stored_in_their_slots_and_nothing_else_changes": 50,
    }
    assert {test: cases[test] for test, count in least.items() if cases[test] < count} == {}
    assert not any("compiles" in test for test in cases), "needs no GPU, and a minute"


def test_every_test_that_needs_a_gpu_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    marked = {
        str(file.relative_to(ROOT))
        for file in (ROOT / "tests").rglob("test_*.py")
        if any(word in file.read_text() for word in ("mark.gpu", "every_backend_and_dtype()"))
        and file != Path(__file__)
    }
    files = {test.partition("::")[0] for test in collected("tests")}
    assert files == marked
    assert "tests/gpu/test_engine.py" in files


TESTS = """
import signal, pytest

def test_passes(): pass
def test_fails(): assert not "this"
def test_hangs():
    while True: signal.pause()
@pytest.mark.skip(reason="not here")
def test_skips(): pass
def test_passes_after_it(): pass
"""
HANGS_OUTSIDE_PYTHON = """
import pytest, signal

@pytest.mark.parametrize("n", range(4))
def test_n(n):
    if n == 1:  # as if in a call of C, where no handler runs
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])
        signal.pause()
"""


def run(folder: Path, tests: str, *options: str) -> tuple[subprocess.CompletedProcess[str], Path]:
    (folder / "pytest.ini").write_text("[pytest]\naddopts = -p no:schemathesis\n")
    (folder / "test_it.py").write_text(tests)
    report = folder / "it.xml"
    command = suites.pytest_command(report, [f"{folder / 'test_it.py'}", *options], seconds=2)  # 1 of them for a test
    environment = {"PYTHONPATH": f"{ROOT}", "PATH": "/usr/bin:/bin"}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True), report


def test_a_test_that_hangs_fails_and_the_others_run(tmp_path: Path) -> None:
    done, report = run(tmp_path, TESTS)
    found = suites.read_report(report)
    assert (found["passed"], found["failed"], found["skipped"]) == (2, 2, 1)
    assert sorted(found["failed_tests"]) == ["test_it::test_fails", "test_it::test_hangs"]
    assert next(iter(found["slowest_seconds"])) == "test_it::test_hangs"
    assert "the test took more than 1 s" in done.stdout


@pytest.mark.skipif(find_spec("xdist") is None, reason="without pytest-xdist nothing takes the place of the process")
def test_a_test_that_hangs_outside_python_ends_its_worker_and_the_others_run(tmp_path: Path) -> None:
    done, report = run(tmp_path, HANGS_OUTSIDE_PYTHON, "--test-grace", "1")
    found = suites.read_report(report)
    assert (found["passed"], found["failed"]) == (3, 1), done.stdout + done.stderr
    assert "in test_n" in done.stderr, "where it was"

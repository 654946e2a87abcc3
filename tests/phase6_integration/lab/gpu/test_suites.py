"""The stages that run tests: what they select, how a test that hangs ends alone, and what is left of a run."""

from collections import Counter
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

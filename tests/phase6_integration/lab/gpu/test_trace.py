"""Traces of the profiler: what counts as the device's work."""

from typing import Any

import pytest

from phase6_integration.lab.gpu.trace import Activity, activities, idle_share, time_per_kernel


def event(category: str, name: str, start: float, end: float) -> dict[str, Any]:
    """A complete event, as Chrome's trace format has it."""
    return {"ph": "X", "cat": category, "name": name, "ts": start, "dur": end - start, "pid": 0, "tid": 7}


def trace(*events: dict[str, Any]) -> dict[str, Any]:
    names = {"ph": "M", "name": "process_name", "pid": 0, "ts": 0, "args": {"name": "python"}}
    return {"traceEvents": [names, *events]}


KERNELS = event("kernel", "a", 0, 40), event("kernel", "b", 60, 100)


@pytest.mark.parametrize(
    ("category", "share"),
    [("cuda_runtime", 0.2), ("cpu_op", 0.2), ("gpu_user_annotation", 0.2), ("cuda_sync", 0.2), ("overhead", 0.2),
     ("gpu_memcpy", 0.1), ("gpu_memset", 0.1)],
)  # fmt: skip
def test_a_gap_between_kernels_is_idle_but_for_copies_and_sets(category: str, share: float) -> None:
    assert idle_share(activities(trace(*KERNELS, event(category, "c", 40, 50)))) == pytest.approx(share)


def test_the_table_sums_the_calls_of_each_kernel_and_the_rest() -> None:
    kernels = [Activity("gemm", 0, 6), Activity("norm", 6, 7), Activity("gemm", 7, 9), Activity("rope", 9, 10)]
    assert time_per_kernel(kernels, listed=1) == [
        {"name": "gemm", "calls": 2, "us": 8, "share": 0.8},
        {"name": "2 others", "calls": 2, "us": 2, "share": 0.2},
    ]

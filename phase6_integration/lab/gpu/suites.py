"""The stages of `gpu_day` that run tests: those that need a GPU, and those of the Triton kernels.

Compilation dominates, so they run in parallel; what they print is in the day's log as they go, and each run leaves its
JUnit XML among the reports of the day.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from xml.etree import ElementTree

from phase6_integration.lab.gpu import limit
from phase6_integration.lab.gpu.rows import Day, Row

ROOT = Path(__file__).parents[3]
PHASES = ("tests/phase1_kv_pool", "tests/phase2_prefill_decode")
# `-m gpu` leaves out what runs on a CPU too, and Triton kernels run on the GPU if there is one. A case of some files
# need not have Triton in its name. What is compiled ahead of time needs no GPU, and a minute.
KERNELS = "test_kernels.py or test_product.py or triton"
AHEAD = "compiles or shared_memory or grid_counts"
SELECTED: dict[str, tuple[str, ...]] = {
    "tests": ("-m", "gpu", "tests/gpu", *PHASES),
    "suites": ("-m", "not gpu and not slow", "-k", f"({KERNELS}) and not ({AHEAD})", *PHASES),
}
OF_LIBRARIES = (
    "tests/phase2_prefill_decode/quantized/test_product.py::test_the_product_is_that_of_the_weight_of_the_library"
)
WITHOUT = {  # a package
    "llguidance": "--ignore=tests/phase2_prefill_decode/test_constraints.py",
    "compressed_tensors": f"--deselect={OF_LIBRARIES}",
    "gguf": f"--deselect={OF_LIBRARIES}",
}
DRY: dict[str, tuple[str, ...]] = {
    "tests": ("-m", "gpu", "tests/gpu/test_warmup.py"),
    "suites": ("-k", "test_kernels.py", "tests/phase1_kv_pool/test_kernels.py"),
}
WORKERS = 12  # each has a context on the GPU
ENDING = 20.0  # seconds in which an interrupted pytest writes its XML
ONE_TEST = 0.7  # of the time of a stage: a test that takes longer fails. A hung one stops one worker of many
LISTED = 40  # failed tests that a row names


def tests(day: Day) -> None:
    """The tests that need a GPU."""
    day.add(lambda: run_suite(day, "tests"), what="tests")


def suites(day: Day) -> None:
    """The tests of the Triton kernels."""
    day.add(lambda: run_suite(day, "suites"), what="suites")


def selection(name: str) -> list[str]:
    """pytest's arguments for the tests of a stage, without those that import what is not installed."""
    without = [option for package, option in WITHOUT.items() if not find_spec(package)]
    return [*SELECTED[name], *without]


def pytest_command(report: Path, selected: Sequence[str], seconds: float | None) -> list[str]:
    """pytest on these tests, in so many seconds."""
    workers = min(os.cpu_count() or 1, WORKERS)
    parallel = ["-n", f"{workers}", "--dist", "worksteal"] if find_spec("xdist") else []
    plain = ["-v", "--tb", "short", "-W", "default", "-p", "no:cacheprovider", "-p", limit.__name__]
    limited = [] if seconds is None else ["--test-seconds", f"{max(1, int(ONE_TEST * seconds))}"]
    reported = ["--junitxml", str(report.resolve())]
    return [sys.executable, "-m", "pytest", *plain, *limited, *parallel, *reported, *selected]


def run_suite(day: Day, name: str) -> Row:
    """Run tests until shortly before the stage is cut. Returns what the XML says; what failed is an error."""
    report = day.work / f"{name}.xml"
    report.unlink(missing_ok=True)
    threads = max(1, (os.cpu_count() or 1) // WORKERS)
    seconds = None if day.left is None else max(day.left - ENDING, 1)
    child = subprocess.Popen(
        pytest_command(report, DRY[name] if day.dry else selection(name), seconds),
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": f"{threads}", "PYTHONUNBUFFERED": "1"},
    )
    try:
        code = child.wait(seconds)
    except subprocess.TimeoutExpired:
        child.send_signal(signal.SIGINT)
        code = child.wait()
    counts = read_report(report)
    if code != 0:
        counts["error"] = f"pytest ended with {code}"
    return counts


def read_report(report: Path) -> Row:
    """Counts of a JUnit XML, with the slowest tests and those that failed."""
    cases = list(ElementTree.parse(report).iter("testcase"))
    states = [{child.tag for child in case} for case in cases]
    names = [f"{case.get('classname')}::{case.get('name')}" for case in cases]
    failed = [name for name, state in zip(names, states, strict=True) if state & {"failure", "error"}]
    skipped = sum("skipped" in state for state in states)
    seconds = {name: float(case.get("time", 0)) for name, case in zip(names, cases, strict=True)}
    slowest = sorted(seconds.items(), key=lambda item: -item[1])[:10]
    counts = {"passed": len(cases) - len(failed) - skipped, "failed": len(failed), "skipped": skipped}
    return {**counts, "failed_tests": failed[:LISTED], "slowest_seconds": dict(slowest)}

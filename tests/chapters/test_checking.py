"""check: runs the workspace's code and reports the result of each exercise."""

import json
import re
from collections.abc import Callable
from typing import Any

import pytest

from chapters.checking import Report, check
from chapters.course import Course
from chapters.testing import run_tests, shorten
from chapters.workspace import State, start

Solve = Callable[[str, str], None]
Edit = Callable[[str, str, str], None]
TESTS = "tests/phase0_request"


@pytest.fixture
def judged(course: Course) -> Callable[[], tuple[dict[str, str], Report]]:
    """Check phase 0 and return the status of each exercise with the report."""
    start(course, course.phase(0))

    def run() -> tuple[dict[str, str], Report]:
        report = check(course, course.phase(0), timeout=60, report=print)
        return {row.exercise.id: row.status for row in report.rows}, report

    return run


Judged = Callable[[], tuple[dict[str, str], Report]]


def test_without_answers_no_test_runs(judged: Judged) -> None:
    statuses, report = judged()
    assert set(statuses.values()) == {"not begun"}
    assert (report.run, report.ok) == (None, True)


def test_partial_work_is_judged_and_the_rest_is_the_reference(course: Course, judged: Judged, solve: Solve) -> None:
    solve("0.1", "self.items += [item]")
    solve("0.3", "return value")
    statuses, report = judged()
    assert statuses == {"0.1": "passed", "0.2": "not begun", "0.3": "failed"}
    assert not report.ok
    assert report.rows[2].note == f"{TESTS}/test_limits.py::test_clamp: assert 5 == 3"
    assert "assert 5 == 3" in report.log.read_text()
    assert State(course).of("0.1").passed
    again = (course.workspace / "phase0_request/queue.py").read_text().replace("+= [item]", "= []")
    (course.workspace / "phase0_request/queue.py").write_text(again)
    statuses, _ = judged()
    assert statuses["0.1"] == "failed"
    progress = State(course).of("0.1")
    assert (progress.result, progress.passed) == ("failed", True)


def test_data_files_next_to_a_module_are_found(course: Course, judged: Judged, solve: Solve) -> None:
    (course.root / "phase0_request/top.txt").write_text("3")
    solve("0.3", "from pathlib import Path\n    return int(Path(__file__).with_name('top.txt').read_text())")
    assert judged()[0]["0.3"] == "passed"


def test_a_syntax_error_does_not_hide_the_other_file(judged: Judged, solve: Solve) -> None:
    solve("0.1", "self.items.append(")
    solve("0.3", "return min(top, value)")
    statuses, report = judged()
    assert statuses == {"0.1": "syntax error", "0.2": "syntax error", "0.3": "passed"}
    assert not report.ok


def test_an_error_on_import_fails_what_it_stops(judged: Judged, edit: Edit, solve: Solve) -> None:
    solve("0.1", "self.items.append(item)")
    solve("0.3", "return min(top, value)")
    edit("workspace/phase0_request/queue.py", '"""A queue."""', "import no_such_module")
    statuses, report = judged()
    assert (statuses["0.1"], statuses["0.2"]) == ("failed", "not begun")
    assert report.rows[0].note.endswith("ModuleNotFoundError: No module named 'no_such_module'")
    assert not report.ok


def test_a_failing_test_of_no_exercise_is_reported(course: Course, judged: Judged, edit: Edit, solve: Solve) -> None:
    (course.root / TESTS / "test_other.py").write_text(
        "from phase0_request import Queue\n\ndef test_doc():\n    assert Queue.__doc__\n"
    )
    solve("0.1", "self.items.append(item)")
    edit("workspace/phase0_request/queue.py", '"""First in, first out."""', "")
    statuses, report = judged()
    assert statuses["0.1"] == "passed"
    assert [result.id for result in report.others] == [f"{TESTS}/test_other.py::test_doc"]
    assert not report.ok


def test_skipped_tests_do_not_pass(course: Course, judged: Judged, edit: Edit, solve: Solve) -> None:
    edit(f"{TESTS}/test_limits.py", "    assert", "    import pytest\n    pytest.skip('no GPU')\n    assert")
    solve("0.3", "return value")
    statuses, report = judged()
    assert statuses["0.3"] == "skipped"
    assert "no GPU" in report.rows[2].note
    assert not State(course).of("0.3").passed


def test_a_missing_test_does_not_pass(judged: Judged, edit: Edit, solve: Solve) -> None:
    edit(f"{TESTS}/test_queue.py", "def test_push", "def test_other")
    solve("0.1", "pass")
    statuses, report = judged()
    assert statuses["0.1"] == "failed"
    assert "no test of it ran" in report.rows[0].note


def test_an_endless_loop_is_located_and_hides_nothing(course: Course, judged: Judged, edit: Edit, solve: Solve) -> None:
    edit(f"{TESTS}/test_queue.py", "import Queue\n", "import Queue\nfrom phase0_request.limits import clamp\n")
    edit(f"{TESTS}/test_queue.py", "queue.push(3)", "queue.push(clamp(3, 9))")
    start(course, course.phase(0))
    solve("0.1", "self.items.append(item)")
    solve("0.2", "return self.items.pop()")
    solve("0.3", "while True:\n        pass")
    line = (course.workspace / "phase0_request/limits.py").read_text().split("\n").index("    while True:") + 1
    lines: list[str] = []
    report = check(course, course.phase(0), timeout=2, report=lines.append)
    stuck = f"{TESTS}/test_limits.py::test_clamp: did not end within 2 s, at workspace/phase0_request/limits.py:"
    assert [(row.status, row.note) for row in report.rows[:2]] == [
        ("passed", "1 tests"),
        ("failed", f"{TESTS}/test_queue.py::test_pop: assert 2 == 1"),
    ]
    assert report.rows[2].status == "failed"
    assert report.rows[2].note in (f"{stuck}{line}", f"{stuck}{line + 1}")
    assert lines[0] in (f"{stuck}{line}.", f"{stuck}{line + 1}.")
    assert lines[1:] == [f"Exercise {id} runs again, on its own." for id in ("0.1", "0.2", "0.3")]
    log = report.log.read_text()
    assert all(re.search(rf"{part}/phase0_request/limits.py\", line \d+ in clamp", log) for part in ("all", "0.3"))
    assert [State(course).of(id).passed for id in ("0.1", "0.2", "0.3")] == [True, False, False]


def test_an_endless_loop_at_import_stops_everything(course: Course, solve: Solve, edit: Edit) -> None:
    start(course, course.phase(0))
    solve("0.1", "self.items.append(item)")
    edit("workspace/phase0_request/queue.py", '"""A queue."""', "while True:\n    pass")
    lines: list[str] = []
    report = check(course, course.phase(0), timeout=2, report=lines.append)
    assert report.rows[0].status == "failed"
    assert "the imports of the tests: did not end within 2 s, at workspace/phase0_request/queue.py:" in lines[0]
    assert lines == [f"{report.rows[0].note}."]


def test_a_process_that_dies_passes_nothing(judged: Judged, solve: Solve) -> None:
    solve("0.1", "import os\n        os._exit(0)")
    solve("0.2", "return self.items.pop(0)")
    statuses, report = judged()
    assert (statuses["0.1"], statuses["0.2"]) == ("failed", "passed")
    assert "pytest ended early" in report.rows[0].note
    assert report.run is not None
    assert all(result.id != f"{TESTS}/test_queue.py::test_push" for result in report.run.results)
    assert not report.ok


def test_long_errors_are_shortened() -> None:
    short = shorten("5 " * 500)
    assert (len(short), short[-3:]) == (160, "...")


def test_the_overlay_is_what_runs(course: Course, tmp_path: Any) -> None:
    overlay = tmp_path / "overlay"
    (overlay / "phase0_request").mkdir(parents=True)
    (overlay / "phase0_request/limits.py").write_text("def clamp(value, top):\n    return 'the overlay'\n")
    with_it = run_tests(course, [TESTS], timeout=60, overlay=overlay)
    assert [(result.id, result.error) for result in with_it.failures] == [
        (f"{TESTS}/test_limits.py::test_clamp", "AssertionError: assert 'the overlay' == 3")
    ]
    assert len(with_it.results) == 3


def test_a_module_imported_before_the_overlay_is_an_error(course: Course, tmp_path: Any) -> None:
    overlay = tmp_path / "overlay"
    (overlay / "phase0_request").mkdir(parents=True)
    (overlay / "phase0_request/limits.py").write_text("def clamp(value, top):\n    return 0\n")
    run = run_tests(course, [TESTS], timeout=60, overlay=overlay, options=["-p", "phase0_request.limits"])
    assert run.results == ()
    assert "imported before the overlay could replace them: phase0_request.limits" in run.output


def test_options_of_an_outer_pytest_do_not_leak(course: Course, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTEST_ADDOPTS", "--collect-only -k nothing")
    monkeypatch.setenv("PYTEST_PLUGINS", "no_such_plugin")
    monkeypatch.setenv("NANO_COURSE_STOP", "0.1")
    run = run_tests(course, [TESTS], timeout=60)
    assert [result.outcome for result in run.results] == ["passed"] * 3


def test_check_shows_a_table_and_fails(course: Course, tool: Callable[..., Any], solve: Solve) -> None:
    said = tool("check")
    assert (said.code, "start N" in said.err) == (2, True)
    start(course, course.phase(0))
    assert tool("check").code == 0
    solve("0.1", "self.items = [[item]]")
    said = tool("check")
    assert said.code == 1
    assert "[[3]] == [3]" in said.out
    assert json.loads((course.private / "state.json").read_text())["0.1"]["result"] == "failed"
    said = tool("check", "1")
    assert (said.code, "`python -m chapters start 1`" in said.err) == (2, True)

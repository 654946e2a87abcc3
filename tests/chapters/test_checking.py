"""check: judges each answer of the workspace alone."""

import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from chapters import overlay
from chapters.checking import Judged, in_words, judge_all, log, together
from chapters.course import Course
from chapters.exercises import load
from chapters.testing import Runner, Runners, run_tests, shorten
from chapters.workspace import State, start

Solve = Callable[[str, str], None]
Edit = Callable[[str, str, str], None]
Check = Callable[..., dict[str, Judged]]
TESTS = "tests/phase0_request"


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("course")


@pytest.fixture
def place(home: Path) -> Path:
    """The same for all tests, and empty. Not a new folder: it is the working directory of the process below."""
    for path in home.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    return home


@pytest.fixture(scope="module")
def runners(home: Path) -> Iterator[Runners]:
    """One process, which forks for each run of these tests."""
    with Runners(Course(home), 1) as one:
        yield one


@pytest.fixture
def check(course: Course, runners: Runners) -> Check:
    """Judge each exercise of phase 0."""
    start(course, course.phase(0))

    def run(timeout: float = 60) -> dict[str, Judged]:
        judged = judge_all(course, load(course, course.phase(0)), runners, timeout)
        return {one.exercise.id: one for one in judged}

    return run


def statuses(judged: dict[str, Judged]) -> list[str]:
    return [one.status for one in judged.values()]


def test_without_answers_no_test_runs(course: Course, check: Check) -> None:
    assert statuses(check()) == ["not begun"] * 3
    assert not log(course, "0.1").exists()


def test_partial_work_is_judged_and_the_rest_is_the_reference(course: Course, check: Check, solve: Solve) -> None:
    solve("0.1", "self.items += [item]")
    solve("0.3", "return value")
    judged = check()
    assert statuses(judged) == ["passed", "not begun", "failed"]
    assert judged["0.1"].note == "1 of 1 tests pass"
    failure = judged["0.3"].failure
    assert failure is not None
    assert failure.line == f"{TESTS}/test_limits.py::test_clamp: assert 5 == 3"
    assert failure.details["statement"] == "assert clamp(5, 3) == 3"
    assert "assert 5 == 3" in log(course, "0.3").read_text()
    assert State(course).of("0.1").passed
    again = (course.workspace / "phase0_request/queue.py").read_text().replace("+= [item]", "= []")
    (course.workspace / "phase0_request/queue.py").write_text(again)
    assert statuses(check()) == ["failed", "not begun", "failed"]
    progress = State(course).of("0.1")
    assert (progress.result, progress.passed) == ("failed", True)


def test_an_answer_is_not_blamed_for_another_one(check: Check, edit: Edit, solve: Solve) -> None:
    """Alone, each uses the reference of the others, in its own file too."""
    edit(f"{TESTS}/test_queue.py", "queue.items = [1, 2]", "queue.push(1)\n    queue.push(2)")
    solve("0.1", "self.items.append(item")
    solve("0.2", "return self.items.pop(0)")
    assert statuses(check()) == ["syntax error", "passed", "not begun"]


def test_answers_that_pass_alone_can_fail_together(
    course: Course, check: Check, solve: Solve, runners: Runners
) -> None:
    solve("0.1", "self.items = [self.items, item] if self.items else [item]")
    solve("0.2", "return self.items.pop(0)")
    (course.root / TESTS / "test_queue.py").write_text(
        "from phase0_request import Queue\n\n\n"
        "def test_push():\n    Queue().push(3)\n\n\n"
        "def test_pop():\n    queue = Queue()\n    queue.push(1)\n    queue.push(2)\n    assert queue.pop() == 1\n"
    )
    judged = check()
    assert statuses(judged) == ["passed", "passed", "not begun"]
    its = [one.exercise for one in judged.values() if one.status == "passed"]
    assert together(course, its, runners, 60) == f"{TESTS}/test_queue.py::test_pop: assert [1] == 1"
    solve("0.3", "return min(value, top)")
    assert together(course, load(course, course.phase(0))[1:], runners, 60) == ""


def test_the_lines_of_the_workspace_that_raised_are_named(course: Course, check: Check, solve: Solve) -> None:
    solve("0.2", "return self.first()\n\n    def first(self):\n        return self.items[9]")
    text = (course.workspace / "phase0_request/queue.py").read_text().split("\n")
    places = [
        f"workspace/phase0_request/queue.py:{text.index(line) + 1}, in {name}"
        for line, name in (("        return self.first()", "pop"), ("        return self.items[9]", "first"))
    ]
    assert list(check()["0.2"].places) == places


def test_of_an_error_raised_from_another_the_first_is_named_too(check: Check, solve: Solve) -> None:
    solve(
        "0.2",
        """try:
            return self.items[9]
        except IndexError as error:
            raise RuntimeError("no item") from error""",
    )
    raised, origin = (int(place.split(":")[1].partition(",")[0]) for place in check()["0.2"].places)
    assert origin == raised - 2


def test_what_is_only_partly_written_says_what_is_left(course: Course, check: Check, edit: Edit) -> None:
    edit(
        "phase0_request/limits.py",
        "def clamp",
        "# region exercise 0.3\ndef floor() -> int:\n    return 0\n\n\ndef clamp",
    )
    edit(
        "phase0_request/limits.py",
        "    # region exercise 0.3\n    return min(value, top)\n    #",
        "    return min(value, top)\n#",
    )
    start(course, course.phase(0), fresh=True)
    path = course.workspace / "phase0_request/limits.py"
    error = 'raise NotImplementedError("exercise 0.3: Clamp")'
    path.write_text(path.read_text().replace(error, "return 0", 1))
    judged = check()["0.3"]
    assert (judged.status, judged.note) == ("failed", "not written yet: clamp; 0 of 1 tests pass")


def test_data_files_next_to_a_module_are_found(course: Course, check: Check, solve: Solve) -> None:
    (course.root / "phase0_request/top.txt").write_text("3")
    solve("0.3", "from pathlib import Path\n    return int(Path(__file__).with_name('top.txt').read_text())")
    assert check()["0.3"].status == "passed"


def test_processes_that_a_test_starts_run_the_answer_too(course: Course, check: Check, solve: Solve) -> None:
    (course.root / TESTS / "test_limits.py").write_text(
        "import subprocess, sys\n\n\ndef test_clamp():\n"
        "    code = 'from phase0_request.limits import clamp; print(clamp(5, 3))'\n"
        "    assert subprocess.run([sys.executable, '-c', code], capture_output=True).stdout == b'mine\\n'\n"
    )
    solve("0.3", "return 'mine'")
    assert check()["0.3"].status == "passed"


def test_an_error_on_import_fails_what_it_stops(check: Check, edit: Edit, solve: Solve) -> None:
    solve("0.1", "self.items.append(item)")
    solve("0.3", "return min(top, value)")
    edit("workspace/phase0_request/queue.py", '"""A queue."""', "import no_such_module")
    judged = check()
    assert statuses(judged) == ["failed", "not begun", "passed"]
    failure = judged["0.1"].failure
    assert failure is not None
    assert failure.error == "ModuleNotFoundError: No module named 'no_such_module'"


def test_skipped_tests_do_not_pass(course: Course, check: Check, edit: Edit, solve: Solve) -> None:
    edit(f"{TESTS}/test_limits.py", "    assert", "    import pytest\n    pytest.skip('no GPU')\n    assert")
    solve("0.3", "return value")
    judged = check()["0.3"]
    assert judged.status == "skipped"
    assert "no GPU" in judged.note
    assert not State(course).of("0.3").passed


def test_a_missing_test_does_not_pass(check: Check, edit: Edit, solve: Solve) -> None:
    edit(f"{TESTS}/test_queue.py", "def test_push", "def test_other")
    solve("0.1", "pass")
    judged = check()["0.1"]
    assert judged.status == "failed"
    assert "no test of it ran" in judged.note


@pytest.mark.parametrize("where", ["the answer", "the imports of the tests"])
def test_an_endless_loop_is_located_and_hides_nothing(
    course: Course, check: Check, edit: Edit, solve: Solve, where: str
) -> None:
    """One computes, the other waits."""
    solve("0.1", "self.items.append(item)")
    if where == "the answer":
        solve("0.3", "while True:\n        pass")
        where = f"{TESTS}/test_limits.py::test_clamp"
    else:
        solve("0.3", "return min(value, top)\n\nimport signal\n\nwhile True:\n    signal.pause()")
    text = (course.workspace / "phase0_request/limits.py").read_text()
    line = text[: text.index("while True")].count("\n") + 1
    judged = check(timeout=1)
    stuck = f"{where}: did not end within 1 s, at workspace/phase0_request/limits.py:"
    assert statuses(judged) == ["passed", "not begun", "failed"]
    assert judged["0.3"].note in (f"{stuck}{line}", f"{stuck}{line + 1}")
    assert re.search(r"0\.3/phase0_request/limits\.py\", line \d+", log(course, "0.3").read_text())


def test_a_process_that_dies_passes_nothing(check: Check, solve: Solve) -> None:
    solve("0.1", "import os\n        os._exit(0)")
    solve("0.2", "return self.items.pop(0)")
    judged = check()
    assert statuses(judged) == ["failed", "passed", "not begun"]
    assert "pytest ended early" in judged["0.1"].note


def test_a_run_starts_with_the_libraries_of_the_one_before_but_not_with_its_modules(course: Course) -> None:
    """Also after one that killed the process in which they were."""
    test = course.root / TESTS / "test_limits.py"
    test.write_text(
        "import os, sys\n\nknown = [name in sys.modules for name in ('mailbox', 'phase0_request.limits')]\n"
        "import mailbox\nimport phase0_request.limits\n\n\n"
        "def test_known():\n    assert known == []\n\n\n"
        "def test_kill():\n    os.kill(os.getppid(), 9)\n    os._exit(0)\n"
    )
    name = course.name(test)
    with Runner(course) as runner:
        known = [runner.run([f"{name}::{case}"], timeout=60).failures for case in ("test_known",) * 2]
        assert [failures[0].error for failures in known] == [
            "assert [False, False] == []",
            "assert [True, False] == []",
        ]
        assert "pytest ended early" in runner.run([f"{name}::test_kill"], timeout=60).stopped
        assert runner.run([f"{name}::test_known"], timeout=60).failures[0].error == known[0][0].error


def test_no_process_outlives_a_run(course: Course) -> None:
    pid = course.root / "pid"
    (course.root / TESTS / "test_limits.py").write_text(
        "import subprocess\n\n\ndef test_child():\n    child = subprocess.Popen(['sleep', '60'])\n"
        f"    open({str(pid)!r}, 'w').write(str(child.pid))\n"
    )
    run_tests(course, [f"{TESTS}/test_limits.py"], timeout=60)
    status = Path("/proc", pid.read_text(), "stat")
    assert not status.exists() or status.read_text().split()[2] == "Z"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("a.py::test_a_page_is_freed_once", "a page is freed once"),
        ("a.py::test_a_page[0-3]", "a page [0-3]"),
        ("a.py::TestAllocator::runTest", "TestAllocator"),
        ("a.py", "a.py"),
    ],
)
def test_a_test_is_named_in_words(name: str, words: str) -> None:
    assert in_words(name) == words


def test_long_errors_are_shortened() -> None:
    short = shorten("5 " * 500)
    assert (len(short), short[-3:]) == (160, "...")


def test_the_overlay_is_what_runs(course: Course, tmp_path: Path) -> None:
    (tmp_path / "phase0_request").mkdir()
    (tmp_path / "phase0_request/limits.py").write_text("def clamp(value, top):\n    return 'the overlay'\n")
    with_it = run_tests(course, [TESTS], timeout=60, overlay=tmp_path)
    assert [(result.id, result.error) for result in with_it.failures] == [
        (f"{TESTS}/test_limits.py::test_clamp", "AssertionError: assert 'the overlay' == 3")
    ]
    assert len(with_it.results) == 3


def test_a_module_imported_before_the_overlay_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "chapters").mkdir()
    (tmp_path / "chapters/overlay.py").touch()
    with pytest.raises(ImportError, match="imported before the overlay could replace them"):
        overlay.install(Path(), tmp_path)


def test_options_of_an_outer_pytest_do_not_leak(course: Course, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTEST_ADDOPTS", "--collect-only -k nothing")
    monkeypatch.setenv("PYTEST_PLUGINS", "no_such_plugin")
    monkeypatch.setenv("NANO_COURSE_OVERLAY", "/nowhere")
    run = run_tests(course, [TESTS], timeout=60)
    assert [result.outcome for result in run.results] == ["passed"] * 3


def test_check_shows_a_failure_in_a_few_lines(
    course: Course, tool: Callable[..., Any], solve: Solve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CI", "true")  # pytest says more where this is set, and is not to see it
    said = tool("check")
    assert (said.code, "start N" in said.err) == (2, True)
    start(course, course.phase(0))
    assert tool("check").code == 0
    solve("0.1", "self.items = [[item]]")
    line = (course.workspace / "phase0_request/queue.py").read_text().split("\n").index(
        "        # region exercise 0.1"
    ) + 1
    for argv in (["check"], ["check", "0"], ["check", "0.1"]):
        said = tool(*argv)
        assert said.code == 1
        assert (
            f"""\
0.1: push
  test       assert queue.items == [3]
             tests/phase0_request/test_queue.py:9
  found      assert [[3]] == [3]
               At index 0 diff: [3] != 3
  begins at  workspace/phase0_request/queue.py:{line}
"""
            in said.out
        )
    assert json.loads((course.private / "state.json").read_text())["0.1"]["result"] == "failed"
    said = tool("check", "1")
    assert (said.code, "`python -m chapters start 1`" in said.err) == (2, True)


def test_a_long_line_of_a_failure_is_wrapped_and_not_cut(
    course: Course, tool: Callable[..., Any], solve: Solve, edit: Callable[[str, str, str], None]
) -> None:
    start(course, course.phase(0))
    solve("0.3", "return value")
    words = " ".join(f"word{number}" for number in range(60))
    edit("tests/phase0_request/test_limits.py", "assert clamp(5, 3) == 3", f"assert clamp(5, 3) == 3, '[{words}]'")
    said = tool("check", "0.3").out
    assert f"[{words}]" in " ".join(said.split())
    assert max(map(len, said.split("\n"))) <= 13 + 110


MACHINE = """
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from phase0_request import Queue


class Machine(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.queue = Queue()

    @rule(item=st.integers(1, 2))
    def push(self, item):
        self.queue.push(item)

    @invariant()
    def short(self):
        with pytest.raises(IndexError):
            self.queue.items[16]


def test_push():
    run_state_machine_as_test(Machine)
"""


def test_a_failing_state_machine_shows_its_last_steps_and_what_was_expected(
    course: Course, tool: Callable[..., Any], solve: Solve
) -> None:
    (course.root / TESTS / "test_queue.py").write_text(MACHINE, encoding="utf-8")
    start(course, course.phase(0))
    solve("0.1", "self.items.append(item)")
    shown = [line.strip() for line in tool("check", "0.1").out.split("\n")]
    assert shown[3:7] == [
        "given      Failing test case: <state machine>",
        "state = Machine()",
        "state.push(item=1)",
        "...",
    ]
    assert shown.count("state.push(item=1)") == 11
    assert "state.short()" not in shown
    assert "test       with pytest.raises(IndexError):" in shown


def test_check_says_whether_all_that_pass_alone_work_together(
    course: Course, tool: Callable[..., Any], solve: Solve
) -> None:
    start(course, course.phase(0))
    solve("0.1", "self.items.append(item)")
    solve("0.2", "return self.items.pop(0)")
    said = tool("check", "0")
    assert (said.code, "\n0.1, 0.2 together: passed\n" in said.out) == (0, True)

"""What runs pytest in a copy of the checkout: check, the gates, break --check, doctor."""

import json
import os
import re
import select
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from chapters.checking import Judged, blank, gate, judge_all, log, together
from chapters.course import Course
from chapters.exercises import load
from chapters.testing import copy_checkout, run_tests
from chapters.workspace import State as Progress
from chapters.workspace import start
from phase6_integration.support.machine_checks import Finding, State

Tool = Callable[..., Any]
Solve = Callable[[str, str], None]
Edit = Callable[[str, str, str], None]
Check = Callable[..., dict[str, Judged]]
TESTS = "tests/phase0_request"
QUEUE, LIMITS = f"{TESTS}/test_queue.py", f"{TESTS}/test_limits.py"


@pytest.fixture
def check(course: Course) -> Check:
    """Judge each exercise of phase 0."""
    start(course, 0)

    def run(timeout: float = 60) -> dict[str, Judged]:
        return {one.exercise.id: one for one in judge_all(course, load(course, 0), timeout)}

    return run


def statuses(judged: dict[str, Judged]) -> list[str]:
    return [one.status for one in judged.values()]


def test_without_answers_no_test_runs(course: Course, check: Check) -> None:
    assert statuses(check()) == ["not begun"] * 3
    assert not log(course, "0.1").exists()


def test_each_answer_is_judged_alone_with_the_reference_elsewhere(
    course: Course, check: Check, edit: Edit, solve: Solve
) -> None:
    edit(QUEUE, "queue.items = [1, 2]", "queue.push(1)\n    queue.push(2)")
    solve("0.1", "self.items.append(item")
    solve("0.2", "return self.items.pop(0)")
    solve("0.3", "return value")
    judged = check()
    assert statuses(judged) == ["syntax error", "passed", "failed"]
    assert judged["0.2"].note == "1 of 1 tests pass"
    failure = judged["0.3"].failure
    assert failure is not None
    assert failure.line == f"{LIMITS}::test_clamp: assert 5 == 3"
    assert "assert 5 == 3" in log(course, "0.3").read_text()
    assert Progress(course).of("0.2").passed
    edit("workspace/phase0_request/queue.py", "return self.items.pop(0)", "return self.items[0]")
    edit(QUEUE, "assert queue.pop() == 1", "assert queue.pop() + queue.pop() == 3")
    assert check()["0.2"].status == "failed"
    assert (Progress(course).of("0.2").result, Progress(course).of("0.2").passed) == ("failed", True)


def test_answers_that_pass_alone_can_fail_together(course: Course, check: Check, solve: Solve) -> None:
    solve("0.1", "self.items = [self.items, item] if self.items else [item]")
    solve("0.2", "return self.items.pop(0)")
    (course.root / QUEUE).write_text(
        "from phase0_request import Queue\n\n\n"
        "def test_push():\n    Queue().push(3)\n\n\n"
        "def test_pop():\n    queue = Queue()\n    queue.push(1)\n    queue.push(2)\n    assert queue.pop() == 1\n"
    )
    judged = check()
    assert statuses(judged) == ["passed", "passed", "not begun"]
    its = [one.exercise for one in judged.values() if one.status == "passed"]
    assert together(course, its, 60) == f"{QUEUE}::test_pop: assert [1] == 1"
    solve("0.3", "return min(value, top)")
    assert together(course, load(course, 0)[1:], 60) == ""


def test_a_failure_names_the_lines_of_the_workspace(course: Course, check: Check, solve: Solve) -> None:
    solve("0.2", "return self.first()\n\n    def first(self):\n        return self.items[9]")
    text = (course.workspace / "phase0_request/queue.py").read_text().split("\n")
    failure = check()["0.2"].failure
    assert failure is not None
    for line, name in (("        return self.first()", "pop"), ("        return self.items[9]", "first")):
        assert f"workspace/phase0_request/queue.py:{text.index(line) + 1}: in {name}" in failure.text


def test_a_failure_hides_the_answers_of_other_exercises(course: Course, check: Check, edit: Edit, solve: Solve) -> None:
    edit(QUEUE, "queue.items = [1, 2]", "queue.push([])\n    queue.items = None")
    edit(QUEUE, "queue.push(3)", "queue.items = None\n    queue.pop()")
    solve("0.1", "self.items.append(item)")
    solve("0.2", "return self.items.first()")
    judged = check()
    for id, answer, shown in (("0.1", "self.items.pop(0)", False), ("0.2", "self.items.first()", True)):
        failure = judged[id].failure
        assert failure is not None
        for text in (failure.text, log(course, id).read_text()):
            assert (answer in text, "# the answer of exercise 0.2" in text) == (shown, not shown)


def test_a_failure_lacks_what_hypothesis_says_of_libraries_and_of_its_slowness(
    course: Course, check: Check, edit: Edit, solve: Solve
) -> None:
    note = "Falsifying example: clamp()\\nExplanation:\\n    These lines were always and only run by"
    edit(
        LIMITS,
        "    assert",
        "    print('WARNING: Hypothesis has spent more than five minutes\\n\\nPLEASE REPORT THIS if')\n"
        f"    error = ValueError('wrong')\n    error.add_note('{note}\\n        /usr/torch/grad_mode.py:86')\n"
        "    if clamp(5, 3) == 5:\n        raise error\n    assert",
    )
    solve("0.3", "return value")
    failure = check()["0.3"].failure
    assert failure is not None
    assert "E   Falsifying example: clamp()" in failure.text
    said = failure.text.split("Falsifying example")[1]
    for noise in ("Explanation", "These lines", "grad_mode", "five minutes", "PLEASE"):
        assert noise not in said


def test_an_error_in_a_library_is_shown_at_the_line_of_the_workspace_without_what_wraps_it(
    course: Course, check: Check, solve: Solve
) -> None:
    """As Triton's interpreter wraps the errors of a kernel: an error that repeats its cause."""
    solve(
        "0.2",
        "import json\n        try:\n            return json.loads('[1,')\n        except ValueError as error:\n"
        "            raise RuntimeError(repr(error)) from error",
    )
    failure = check()["0.2"].failure
    assert failure is not None
    assert failure.error.startswith("json.decoder.JSONDecodeError: Expecting value")
    assert "return json.loads('[1,')" in failure.text
    assert "RuntimeError: " not in failure.text
    assert "decoder.py" not in failure.text


def test_tests_run_in_the_order_in_which_an_exercise_names_them(
    course: Course, check: Check, edit: Edit, solve: Solve
) -> None:
    edit("chapters/00_exercises.toml", f'["{QUEUE}::test_pop"]', f'["{QUEUE}::test_pop", "{QUEUE}"]')
    edit(QUEUE, "    queue.push(3)", "    queue.push(3)\n    queue.pop()")
    solve("0.2", "return None")
    failure = check()["0.2"].failure
    assert failure is not None
    assert failure.id == f"{QUEUE}::test_pop"


def test_data_files_and_processes_see_the_answer(course: Course, check: Check, solve: Solve) -> None:
    (course.root / "phase0_request/top.txt").write_text("mine")
    (course.root / LIMITS).write_text(
        "import subprocess, sys\n\n\ndef test_clamp():\n"
        "    code = 'from phase0_request.limits import clamp; print(clamp(5, 3))'\n"
        "    assert subprocess.run([sys.executable, '-c', code], capture_output=True).stdout == b'mine\\n'\n"
    )
    solve("0.3", "from pathlib import Path\n    return Path(__file__).with_name('top.txt').read_text()")
    assert check()["0.3"].status == "passed"


def test_an_error_on_import_fails_the_exercises_of_its_file(check: Check, edit: Edit, solve: Solve) -> None:
    solve("0.1", "self.items.append(item)")
    solve("0.3", "return min(top, value)")
    edit("workspace/phase0_request/queue.py", '"""A queue."""', "import no_such_module")
    judged = check()
    assert statuses(judged) == ["failed", "not begun", "passed"]
    failure = judged["0.1"].failure
    assert failure is not None
    assert failure.error == "ModuleNotFoundError: No module named 'no_such_module'"


def test_skipped_and_missing_tests_do_not_pass(course: Course, check: Check, edit: Edit, solve: Solve) -> None:
    edit(LIMITS, "    assert", "    import pytest\n    pytest.skip('no GPU')\n    assert")
    edit(QUEUE, "def test_push", "def test_other")
    solve("0.1", "pass")
    solve("0.3", "return value")
    judged = check()
    assert (judged["0.3"].status, "no GPU" in judged["0.3"].note) == ("skipped", True)
    assert (judged["0.1"].status, "no test of it ran" in judged["0.1"].note) == ("failed", True)
    assert not Progress(course).of("0.3").passed


def test_an_endless_loop_is_located_and_hides_nothing(course: Course, check: Check, solve: Solve) -> None:
    solve("0.1", "self.items.append(item)")
    solve("0.3", "while True:\n        pass")
    text = (course.workspace / "phase0_request/limits.py").read_text()
    line = text[: text.index("while True")].count("\n") + 1
    judged = check(timeout=3)
    stuck = f"{LIMITS}::test_clamp: did not end within 3 s, at workspace/phase0_request/limits.py:"
    assert statuses(judged) == ["passed", "not begun", "failed"]
    assert judged["0.3"].note in (f"{stuck}{line}", f"{stuck}{line + 1}")


def test_a_process_that_dies_passes_nothing(check: Check, solve: Solve) -> None:
    solve("0.1", "import os\n        os._exit(0)")
    solve("0.2", "return self.items.pop(0)")
    judged = check()
    assert statuses(judged) == ["failed", "passed", "not begun"]
    assert "pytest ended early" in judged["0.1"].note


@pytest.mark.skipif(sys.platform == "win32", reason="has no such signal")
def test_a_segmentation_fault_is_named_and_located(course: Course, check: Check, solve: Solve) -> None:
    """As of a kernel without a mask, in Triton's interpreter."""
    solve("0.1", "import os, signal\n        os.kill(os.getpid(), signal.SIGSEGV)")
    text = (course.workspace / "phase0_request/queue.py").read_text()
    line = text[: text.index("os.kill")].count("\n") + 1
    note = check()["0.1"].note
    assert "is a mask missing in a kernel?" in note
    assert note.endswith(f"at workspace/phase0_request/queue.py:{line}")
    assert "Segmentation fault" in log(course, "0.1").read_text()


def test_a_warning_of_numpy_says_what_it_means(check: Check, solve: Solve) -> None:
    """Triton's interpreter computes with NumPy."""
    solve("0.3", "import warnings\n    warnings.warn('overflow encountered in exp', RuntimeWarning)\n    return value")
    failure = check()["0.3"].failure
    assert failure is not None
    assert "subtract the maximum" in failure.text


@pytest.fixture
def copy(course: Course) -> Path:
    return copy_checkout(course, course.private / "copy", {})


@pytest.mark.skipif(sys.platform != "linux", reason="waits for a process that is no child")
def test_no_process_outlives_a_run(copy: Path) -> None:
    (copy / LIMITS).unlink()
    (copy / LIMITS).write_text(
        "import subprocess\n\n\ndef test_child():\n    child = subprocess.Popen(['sleep', '60'])\n"
        "    open('pid', 'w').write(str(child.pid))\n"
    )
    run_tests(copy, [LIMITS], timeout=60)
    with suppress(ProcessLookupError):
        process = os.pidfd_open(int((copy / "pid").read_text()))
        assert select.select([process], [], [], 30)[0], "it still runs"


def test_check_shows_what_pytest_says_and_where_the_code_begins(course: Course, tool: Tool, solve: Solve) -> None:
    said = tool("check")
    assert (said.code, "start N" in said.err) == (2, True)
    start(course, 0)
    assert tool("check").code == 0
    solve("0.1", "self.items.append(-item)")
    text = (course.workspace / "phase0_request/queue.py").read_text()
    line = text.split("\n").index("        # region exercise 0.1") + 1
    for argv in (["check"], ["check", "0"], ["check", "0.1"]):
        said = tool(*argv)
        assert said.code == 1
        assert f"0.1: {QUEUE}::test_push\n" in said.out
        assert "assert queue.items == [3]" in said.out
        assert f"Your code begins at workspace/phase0_request/queue.py:{line}." in said.out
    assert json.loads((course.private / "state.json").read_text())["0.1"]["result"] == "failed"


# The gate


def test_the_gate_names_the_test_that_catches_each_exercise(tool: Tool) -> None:
    said = tool("exercises", "--gate", "0")
    assert said.code == 0
    assert all(test in said.out for test in (f"{QUEUE}::test_push", f"{QUEUE}::test_pop", f"{LIMITS}::test_clamp"))
    assert said.out.count("passed: caught by") == 3


def test_the_gate_refuses_tests_that_a_right_answer_does_not_pass(course: Course, tool: Tool, edit: Edit) -> None:
    code = "both = sorted([value, top])\\nreturn both[0]"
    answer = f'[[answer]]\nexercise = "Clamp"\nway = "sorted"\npieces = ["{code}"]\n'
    (course.root / "tests/chapters").mkdir(parents=True)
    (course.root / "tests/chapters/answers.toml").write_text(answer)
    said = tool("exercises", "--gate", "0")
    assert (said.code, "0.3, sorted, passed" in said.out) == (0, True)
    edit(LIMITS, "clamp(5, 3) == 3", "clamp.__code__.co_nlocals == 2")
    said = tool("exercises", "--gate", "0")
    assert (said.code, f"0.3, sorted, failed: {LIMITS}::test_clamp: " in said.out) == (1, True)


CAUGHT = "    try:\n        clamp(5, 3)\n    except NotImplementedError as error:\n        "
# What a test is instead, and what the gate says of an exercise that has no other: a pattern, "" if it passes.
TESTED = {
    "plain": ("clamp(5, 3)", ""),
    "cause": (f"{CAUGHT}raise RuntimeError('engine died') from error", ""),
    "context": (f"{CAUGHT}raise RuntimeError('engine died')", ""),
    "group": (f"{CAUGHT}raise ExceptionGroup('two', [error]) from None", ""),
    "printed": (f"{CAUGHT}print(error)\n    assert False", ""),
    "passes": ("assert clamp", "all of its 1 tests pass"),
    "hidden": (f"{CAUGHT}pass\n    assert False", "a test fails for another reason: tests/test_hidden.py::test_it: .*"),
    "skipped": ("import pytest; pytest.skip('no GPU')", "no test ran: 1 skipped.*"),
    "broken": ("pass\n\nTOP = clamp(5, 3)", "a test fails for another reason: tests/test_broken.py: NotImpl.*"),
    "gone": ("pass\n\ndel test_it", "no test ran: .*"),
    "hangs": (
        f"{CAUGHT}import signal; signal.pause()",
        "the run stopped in tests/test_hangs.py::test_it: did not end within 3 s",
    ),
}


def test_what_does_not_catch_an_exercise_is_named(course: Course) -> None:
    """One gate for several exercises, which differ in their test: each is judged alone."""
    (exercise,) = (each for each in load(course, 0) if each.id == "0.3")
    for name, (body, _) in TESTED.items():
        text = f"from phase0_request.limits import clamp\n\n\ndef test_it():\n    {body.strip()}\n"
        (course.root / f"tests/test_{name}.py").write_text(text)
    change = blank(course, exercise)
    changes = [replace(change, id=name, tests=(f"tests/test_{name}.py::test_it",)) for name in TESTED]
    for verdict, (_, problem) in zip(gate(course, changes, timeout=3), TESTED.values(), strict=True):
        assert re.fullmatch(problem, verdict.problem), verdict


# Bugs

BUG = """
[[bug]]
id = "0a"
title = "Forgets the limit"
file = "phase0_request/limits.py"
symptom = "clamp gives too much"
repro = "from phase0_request.limits import clamp; print(clamp(5, 3))"
hints = ["Count.", "Count again."]
explanation = "It took the larger one."
sources = ["somewhere"]
tests = ["tests/phase0_request/test_limits.py"]
[[bug.edit]]
before = "min("
after = "max("
"""


@pytest.fixture
def bugs(course: Course) -> Iterator[Path]:
    path = course.chapters / "00_bugs.toml"
    path.write_text(BUG)
    return path


def test_a_bug_is_planted_found_and_mended(course: Course, tool: Tool, bugs: Path, edit: Edit) -> None:
    start(course, 0)
    said = tool("break", "0")
    assert "clamp gives too much" in said.out
    assert "The copy holds the reference's answers to 0.1, 0.2, 0.3: leave those closed." in said.out
    copy = course.workspace / "bug/phase0_request/limits.py"
    assert "max(" in copy.read_text()
    said = tool("break", "--check")
    assert (said.code, "test_clamp" in said.out) == (1, True)
    assert "Count.\n" in tool("break", "--hint").out
    edit("workspace/bug/phase0_request/limits.py", "max(value, top)", "sorted([value, top])[0]")
    said = tool("break", "--check")
    assert (said.code, "Forgets the limit" in said.out) == (0, True)
    assert "The files are in .course/backups/1/." in said.out
    assert tool("break", "--list").out == "0a   mended      1 hints\n"
    assert "1/1" in tool("status").out, "the bugs that are mended"
    assert "break N" in tool("break", "--check").err, "a mended bug is put away"


TEST = "from phase0_request.limits import clamp\n\n\ndef test_it():\n    assert clamp(5, 3) %s 3\n"


def test_a_hunt_by_symptom_wants_a_test_that_fails_with_the_bug_only(
    course: Course, tool: Tool, bugs: Path, edit: Edit
) -> None:
    said = tool("break", "0", "--grade", "1").out
    assert "a test that shows it into workspace/bug/test_bug.py" in said
    assert "break --test" in said
    assert not (course.workspace / "bug/repro.py").exists()
    assert "there is no reproduction" in tool("break", "--run").err
    written = course.workspace / "bug/test_bug.py"
    said = tool("break", "--check")
    assert (said.code, "you have not written it yet" in said.err) == (2, True)
    written.write_text(TEST.replace("3\n", "4\n") % "==")
    assert "it does not pass on the sound code: assert 3 == 4" in tool("break", "--check").out
    written.write_text(TEST % ">=")
    assert "does not show bug 0a: it passes with the bug, too." in tool("break", "--check").out
    written.write_text(TEST % "== (")
    assert "does not show bug 0a: workspace/bug/test_bug.py:5: " in tool("break", "--check").out
    written.write_text(TEST % "==")
    said = tool("break", "--check")
    assert "fails with the bug and passes without it.\nBug 0a is not mended.\n" in said.out
    assert "Your test still fails: assert 5 == 3" in said.out
    assert "Tests of the symptom that fail: 1." in said.out
    assert "test_clamp" not in said.out, "it would lead to the place"
    written.unlink()
    said = tool("break", "--check")
    assert (said.code, said.out) == (2, ""), "no hidden test has run"
    assert "workspace/bug/test_bug.py is missing: write it first" in said.err
    written.write_text(TEST % "==")
    edit("workspace/bug/phase0_request/limits.py", "max(", "min(")
    assert tool("break", "--check").code == 0


@pytest.fixture
def broken(course: Course, bugs: Path) -> None:
    """The bug has a second test, which passes with it."""
    path = course.root / "tests/phase0_request/test_limits.py"
    path.write_text(path.read_text() + "\n\ndef test_high():\n    assert clamp(3, 5) <= 5\n")


@pytest.mark.parametrize(
    ("grade", "mend", "verdict"),
    [
        ("1", "return value + 9", "Your test still fails: assert 14 == 3\nTests of the symptom that fail: 1.\n"),
        ("1", "return 3 * (top == 3) + 9 * (top == 5)", "Your test passes now.\n"),
        (
            "2",
            "return value + 9",
            f"Tests of the symptom that fail: 1:\n{LIMITS}::test_clamp",
        ),
        (
            "2",
            "return 9",
            f"Tests that passed with the bug and fail now: 1:\n{LIMITS}::test_high",
        ),
        ("2", "return 3 +", "workspace/bug/phase0_request/limits.py:3: invalid syntax\n"),
        (
            "2",
            "return 3\n\n\nunknown()",
            "name 'unknown' is not defined, at workspace/bug/phase0_request/limits.py:6",
        ),
    ],
)
def test_a_wrong_mend_is_told_what_is_wrong_with_it(
    course: Course, tool: Tool, broken: None, edit: Edit, grade: str, mend: str, verdict: str
) -> None:
    tool("break", "0", "--grade", grade)
    if grade == "1":
        (course.workspace / "bug/test_bug.py").write_text(TEST % "==")
    edit("workspace/bug/phase0_request/limits.py", "return max(value, top)", mend)
    said = tool("break", "--check")
    assert said.code == 1
    assert verdict in said.out


@pytest.mark.parametrize(
    "way", [["--test"], ["--run", "-m", "pytest", "workspace/bug/test_bug.py::test_it"], "absolute"]
)
def test_the_readers_test_runs_with_the_bug(standalone: Course, bugs: Path, tool: Tool, way: list[str]) -> None:
    tool("break", "0", "--grade", "1")
    written = standalone.workspace / "bug/test_bug.py"
    written.write_text(TEST % "==")
    command = [
        sys.executable,
        "-m",
        "chapters",
        "break",
        *(["--run", "-m", "pytest", written] if way == "absolute" else way),
    ]
    done = subprocess.run(command, cwd=standalone.root, capture_output=True, text=True, timeout=50)
    assert (done.returncode, "assert 5 == 3" in done.stdout) == (1, True), done
    alone = [sys.executable, "-m", "pytest", written.name]
    done = subprocess.run(alone, cwd=written.parent, capture_output=True, text=True, timeout=50)
    assert done.returncode == 4, "the sound code is not tested in silence"
    assert "`python -m chapters break --test`" in done.stderr


def test_a_checkout_that_is_not_the_release_plants_nothing_and_tells_nothing(
    course: Course, tool: Tool, bugs: Path, edit: Edit
) -> None:
    tool("break", "0", "--grade", "1")
    (course.workspace / "bug/test_bug.py").write_text(TEST % "==")
    edit("phase0_request/limits.py", "min(", "sorted(")
    for command in (["break", "0"], ["break", "--check"]):
        said = tool(*command)
        assert (said.code, said.out) == (2, "")
        assert "phase0_request/limits.py differs from the release: restore it" in said.err
        assert "min(" not in said.err, "it is the answer"
    assert (course.workspace / "bug/test_bug.py").read_text() == TEST % "==", "the hunt is as it was"


def test_another_hunt_says_where_the_old_one_is_and_another_grade_keeps_the_test(
    course: Course, tool: Tool, bugs: Path
) -> None:
    written = course.workspace / "bug/test_bug.py"
    assert "put away" not in tool("break", "0").out
    assert "Bug 0a is put away.\n" in tool("break", "0", "--grade", "1").out, "untouched: there is nothing to keep"
    assert not (course.private / "backups").exists()
    written.write_text(TEST % "==")
    assert "grade 1; hints seen: 0" in tool("status").out
    assert "Bug 0a is put away. The files are in .course/backups/1/." in tool("break", "0", "--grade", "3").out
    assert written.read_text() == TEST % "=="
    tool("break", "--stop")
    tool("break", "0")
    (course.workspace / "bug/0a.jsonl").write_text("a film")
    assert ".course/backups/3/" in tool("break", "0", "--grade", "3").out, "the reader has made a file"
    assert (course.private / "backups/3/bug/0a.jsonl").read_text() == "a film"
    tool("break", "--hint")
    assert "Bug 0a is planted, grade 3; hints seen: 1" in tool("status").out
    assert "Bug 0a is put away.\n" in tool("break", "--stop").out
    assert "no bug is planted" in tool("break", "--stop").err


def test_what_git_has_not_got_is_not_taken_for_the_release_in_silence(
    course: Course, tool: Tool, bugs: Path, edit: Edit
) -> None:
    git = ["git", "-C", str(course.root), "-c", "user.name=a", "-c", "user.email=a@b"]
    for command in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "release"]):
        subprocess.run([*git, *command], check=True)
    assert "Changed since" not in tool("break", "0").out
    edit("phase0_request/queue.py", "First in", "Last in")
    assert "Changed since the last commit, and taken for sound code: phase0_request/queue.py." in tool("break", "0").out


def test_the_easiest_grade_names_the_file(tool: Tool, bugs: Path) -> None:
    assert "It is in workspace/bug/phase0_request/limits.py." in tool("break", "0a", "--grade", "3").out
    assert "limits.py" not in tool("break", "0a").out


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (("max(", "min(  "), "0a failed: all of its 1 tests pass"),
        (("max(", "max(("), "0a failed: a test fails for another reason"),
        (('"min("', '"pop"'), "the text to replace is 0 times in phase0_request/limits.py"),
        (("max(", "max("), "0a passed: caught by tests/phase0_request/test_limits.py::test_clamp"),
    ],
)
def test_the_gate_refuses_a_bug_that_no_test_catches(
    tool: Tool, bugs: Path, change: tuple[str, str], problem: str
) -> None:
    bugs.write_text(BUG.replace(*change))
    said = tool("break", "--gate")
    assert problem in said.out + said.err
    assert (said.code == 0) == ("passed" in problem)


# Doctor


def test_the_proof_runs_the_marked_tests_only(
    course: Course, tool: Tool, edit: Edit, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = Finding(State.OK, "processor", "a fast one")
    monkeypatch.setattr("phase6_integration.support.machine_checks.findings", lambda machine: [found])
    said = tool("doctor")
    assert (said.code, "The reference works here: 1 tests marked `proof` passed" in said.out) == (0, True)
    edit("phase0_request/queue.py", "pop(0)", "pop()")
    said = tool("doctor")
    assert (said.code, f"failed: {QUEUE}::test_pop: assert 2 == 1" in said.out) == (1, True)
    edit(QUEUE, "@pytest.mark.proof\n", "")
    said = tool("doctor")
    assert (said.code, "No proof: 0 tests" in said.out) == (1, True)
    (course.root / "pyproject.toml").unlink()
    said = tool("doctor")
    assert (said.code, "processor" in said.out, "Clone the repository" in said.err) == (2, True, True)

"""exercises --gate: a blank exercise fails its tests for the right reason, and the reference passes them."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from chapters.checking import Verdict, gate
from chapters.course import Course
from chapters.exercises import blanked, load
from chapters.testing import run_tests

Edit = Callable[[str, str, str], None]
QUEUE, LIMITS = "tests/phase0_request/test_queue.py", "tests/phase0_request/test_limits.py"


def verdict(course: Course, id: str, timeout: float = 60) -> Verdict:
    its = [each for each in load(course, course.phase(0)) if each.id == id]
    return next(iter(gate(course, its, timeout)))


def test_every_exercise_of_the_miniature_course_passes(tool: Callable[..., Any]) -> None:
    said = tool("exercises", "--gate", "0")
    assert said.code == 0
    assert said.out.count("passed") == 3
    assert all(test in said.out for test in (f"{QUEUE}::test_push", f"{QUEUE}::test_pop", f"{LIMITS}::test_clamp"))


ASSERTION = "    assert clamp(5, 3) == 3"
# What a test is instead, and what the gate says of an exercise that has it for its only one: a pattern.
PROBLEMS = {
    "passes": ((ASSERTION, "    assert clamp"), "blank, all of its 1 tests pass"),
    "missing": (
        (
            ASSERTION,
            "    try:\n        clamp(5, 3)\n    except NotImplementedError:\n        missing = True\n"
            "    else:\n        missing = False\n    assert not missing",
        ),
        "blank, a test fails for another reason: tests/test_missing.py::test_clamp: assert not True.*",
    ),
    "wrong": (
        (ASSERTION, "    assert clamp(5, 3) == 4"),
        "the reference fails tests/test_wrong.py::test_clamp: assert 3 == 4.*",
    ),
    "skipped": ((ASSERTION, "    import pytest\n    pytest.skip('no GPU')"), "blank, no test ran: 1 skipped.*"),
    "broken": (
        ("def test_clamp", "TOP = clamp(5, 3)\n\n\ndef test_clamp"),
        "blank, tests/test_broken.py cannot be collected: NotImplementedError: exercise 0.3: Clamp",
    ),
    "gone": (("test_clamp", "test_another"), "blank, no test ran: .*"),
}


def test_what_does_not_catch_an_exercise_is_named(course: Course) -> None:
    """One gate for several exercises, which differ in their test: each is judged alone."""
    (exercise,) = (each for each in load(course, course.phase(0)) if each.id == "0.3")
    text = (course.root / LIMITS).read_text()
    for name, ((old, new), _) in PROBLEMS.items():
        assert old in text
        (course.root / f"tests/test_{name}.py").write_text(text.replace(old, new))
    exercises = [replace(exercise, tests=(f"tests/test_{name}.py::test_clamp",)) for name in PROBLEMS]
    found = gate(course, [exercise, *exercises], timeout=60)
    assert next(found).ok
    for one, (_, problem) in zip(found, PROBLEMS.values(), strict=True):
        assert not one.ok
        assert re.fullmatch(problem, one.problem)


CARRIERS = """\
import pytest

from phase0_request.limits import clamp


@pytest.fixture
def broken():
    return clamp(5, 3)


def test_plain():
    clamp(5, 3)


def test_setup(broken):
    assert broken


def test_cause():
    try:
        clamp(5, 3)
    except NotImplementedError as error:
        raise RuntimeError("engine died") from error


def test_context():
    try:
        clamp(5, 3)
    except NotImplementedError:
        raise RuntimeError("engine died")


def test_hidden_context():
    try:
        clamp(5, 3)
    except NotImplementedError:
        raise RuntimeError("engine died") from None


def test_group():
    try:
        clamp(5, 3)
    except NotImplementedError as error:
        raise ExceptionGroup("two", [error]) from None


def test_message():
    try:
        text = str(clamp(5, 3))
    except NotImplementedError as error:
        text = str(error)
    assert text == "3"


def test_captured_output():
    try:
        clamp(5, 3)
    except NotImplementedError as error:
        print(error)
        missing = True
    else:
        missing = False
    assert not missing


def test_another_reason():
    try:
        clamp(5, 3)
    except NotImplementedError:
        missing = True
    else:
        missing = False
    assert not missing
"""


def test_a_failure_carries_the_exercise_in_its_chain_or_its_report(course: Course, tmp_path: Path) -> None:
    (course.root / LIMITS).write_text(CARRIERS)
    exercise = load(course, course.phase(0))[2]
    (tmp_path / "overlay/phase0_request").mkdir(parents=True)
    (tmp_path / "overlay" / exercise.file).write_text(blanked(course, exercise.file, [exercise]))
    run = run_tests(course, [LIMITS], timeout=60, overlay=tmp_path / "overlay")
    carried = {result.id.partition("::")[2]: result.exercises for result in run.failures}
    assert carried.pop("test_another_reason") == ()
    assert list(carried.values()) == [("0.3",)] * 8


def test_a_blank_that_hangs_is_ended_and_does_not_count(course: Course, edit: Edit) -> None:
    edit(
        LIMITS,
        "assert clamp(5, 3) == 3",
        "import signal\n    try:\n        clamp(5, 3)\n    except NotImplementedError:\n        signal.pause()",
    )
    found = verdict(course, "0.3", timeout=2)
    assert found.problem == f"blank, the run stopped in {LIMITS}::test_clamp: did not end within 2 s"


def test_timeout_needs_gate(tool: Callable[..., Any]) -> None:
    assert tool("exercises", "--timeout", "3").code == 2


def test_a_phase_without_exercises_is_an_error(tool: Callable[..., Any]) -> None:
    said = tool("exercises", "--gate", "1")
    assert (said.code, "phase 1 has no exercises; phases that have some: 0" in said.err) == (2, True)

"""Bugs are planted in a copy, judged by their tests, and told without giving them away. The gate proves all of them."""

import shutil
from pathlib import Path

import pytest

from chapters import bugs
from chapters.cli import main
from chapters.course import Course, CourseError
from chapters.workspace import State

COURSE = Course.here()
MODULE = "phase0_toy/thing.py"
TOML = """
[[bug]]
id = "0a"
title = "Adds one too many"
file = "phase0_toy/thing.py"
symptom = "2 + 2 is 5"
repro = "from phase0_toy.thing import add; print(add(2, 2))"
hints = ["Count.", "Count again."]
explanation = "It added one more."
sources = ["somewhere"]
tests = ["tests/phase0_toy/test_thing.py"]
[[bug.edit]]
before = "a + b"
after = "a + b + 1"
"""


@pytest.fixture
def course(tmp_path: Path) -> Course:
    files = {
        MODULE: "def add(a: int, b: int) -> int:\n    return a + b\n",
        "phase0_toy/__init__.py": "",
        "tests/phase0_toy/test_thing.py": "from phase0_toy.thing import add\ndef test_sum(): assert add(2, 2) == 4\n",
        "chapters/00_bugs.toml": TOML,
        "pyproject.toml": "[project]\nname = 'toy'\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    return Course(tmp_path)


def test_every_phase_has_bugs_whose_edits_find_their_lines_and_compile() -> None:
    for phase in COURSE.phases():
        its = bugs.load(COURSE, phase)
        assert len(its) >= 2
        for bug in its:
            text = (COURSE.root / bug.file).read_text(encoding="utf-8")
            compile(bug.planted(text), bug.file, "exec")
            compile(bug.repro, f"bug {bug.id}", "exec")
            assert bug.title not in bug.symptom
            assert all((COURSE.root / test.partition("::")[0]).is_file() for test in bug.tests)
    assert len(bugs.every(COURSE)) >= 20


def test_a_bug_is_planted_found_and_mended(course: Course, capsys: pytest.CaptureFixture[str]) -> None:
    def run(*arguments: str) -> tuple[int, str]:
        code = main(["break", *arguments], course)
        return code, capsys.readouterr().out

    assert "2 + 2 is 5" in run("0")[1]
    copy = course.workspace / "bug" / MODULE
    assert "a + b + 1" in copy.read_text(encoding="utf-8")
    code, out = run("--check")
    assert (code, "test_sum" in out) == (1, True)
    assert "Count.\n" in run("--hint")[1]
    copy.write_text("def add(a, b):\n    return b + a\n", encoding="utf-8")
    code, out = run("--check")
    assert (code, "Adds one too many" in out) == (0, True)
    assert "The files are in .course/backups/bugs/1/." in out
    assert run("--list")[1] == "phase0_toy\n0a  mended      1 hints\n"
    main(["status"], course)
    assert "1/1" in capsys.readouterr().out, "the bugs that are mended"
    assert run("--check")[0] == 2, "a mended bug is put away"


def test_a_bug_waits_for_the_exercises_whose_answers_its_copy_shows(
    course: Course, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "def add(a: int, b: int) -> int:\n    # region exercise 0.1\n    return a + b\n    # endregion\n"
    (course.root / MODULE).write_text(text, encoding="utf-8")
    fields = 'id = "0.1"\ntitle = "Add"\nquestion = "Add."\nhints = ["+"]\ntests = ["tests/phase0_toy/test_thing.py"]\n'
    exercise = f'[[exercise]]\nfile = "{MODULE}"\n{fields}'
    (course.chapters / "00_exercises.toml").write_text(exercise, encoding="utf-8")
    assert main(["break", "0"], course) == 2
    assert "answers to 0.1; solve those first, or go on with `break 0 --anyway`" in capsys.readouterr().err
    assert not bugs.folder(course).exists()
    assert main(["break", "0", "--anyway"], course) == 0
    State(course).update("0.1", passed=True)
    assert main(["break", "0"], course) == 0


def test_a_new_bug_keeps_the_files_of_the_one_before(course: Course) -> None:
    assert main(["break", "0a"], course) == 0
    (course.workspace / "bug" / MODULE).write_text("mine", encoding="utf-8")
    assert main(["break", "0a"], course) == 0
    assert (course.private / "backups/bugs/1" / MODULE).read_text(encoding="utf-8") == "mine"
    assert main(["break", "--stop"], course) == 0
    assert not bugs.folder(course).exists()


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (("a + b + 1", "b + a"), "passes with the bug"),
        (("a + b + 1", "a +"), "cannot be collected"),
        (("test_thing.py", "test_none.py"), "no test ran"),
    ],
)
def test_the_gate_refuses_a_bug_that_no_test_catches(
    course: Course, change: tuple[str, str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = course.chapters / "00_bugs.toml"
    file.write_text(TOML.replace(*change), encoding="utf-8")
    assert main(["break", "--gate"], course) == 1
    assert problem in capsys.readouterr().out


def test_the_gate_names_the_test_that_caught_a_bug(course: Course, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["break", "--gate"], course) == 0
    assert "0a passed: caught by tests/phase0_toy/test_thing.py" in capsys.readouterr().out


def test_an_edit_that_does_not_find_its_lines_once_is_an_error(course: Course) -> None:
    [bug] = bugs.every(course)
    for text in ("return b + a", "return a + b or a + b"):
        with pytest.raises(CourseError, match="times in phase0_toy"):
            bug.planted(text)


def test_without_a_planted_bug_the_error_says_how_to_plant_one(course: Course) -> None:
    shutil.rmtree(course.workspace, ignore_errors=True)
    with pytest.raises(CourseError, match="break N"):
        bugs.current(course)

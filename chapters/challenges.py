"""The commands `break` and `quiz`: each prints its results and returns its exit code."""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Iterator

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from chapters import authoring, bugs, checking, workspace
from chapters import quiz as quizzes
from chapters.bugs import Bug
from chapters.commands import execute, print_diff, show_hints
from chapters.course import Course, CourseError
from chapters.workspace import State, back_up

_PYTEST = ("-m", "pytest", "-q", "-p", "no:cacheprovider")


def break_it(course: Course, args: argparse.Namespace, out: Console) -> int:
    if args.gate:
        its = bugs.choose(course, args.bug) if args.bug else bugs.every(course)
        return authoring.gate(course, [checking.planted(course, bug, tells=True) for bug in its], args.timeout, out)
    if args.list:
        return _list(course, out)
    planting = not (args.test or args.check or args.hint or args.reveal or args.stop or args.program is not None)
    if planting:
        return _plant(course, args.bug, args.grade, out)
    bug = bugs.current(course)
    if args.program is not None:
        if not args.program and not (bugs.folder(course) / "repro.py").is_file():
            instead = "`break --run -m MODULE` runs any module with the bug, `break --test` your test"
            raise CourseError(f"there is no reproduction: {instead}")
        command = [bugs.in_copy(course, argument) for argument in args.program] or ["workspace/bug/repro.py"]
        return execute(course, "run", bugs.files(course), command, inside=True)
    if args.test:
        bugs.written_test(course)
        return execute(course, "run", bugs.files(course), [*_PYTEST, bugs.OWN], inside=True)
    if args.check:
        return _check(course, bug, args.timeout, out)
    if args.hint:
        return show_hints(course, bug.key, bug.hints, "break --reveal", out)
    if args.reveal:
        return _reveal(course, bug, out)
    out.print(bugs.put_away(course))
    return 0


def _plant(course: Course, what: str | None, grade: int, out: Console) -> int:
    """Plant the bug with this id, or the next of this chapter that is not mended. Grade 1 gives the symptom, 2 a
    reproduction, 3 the file too. The copy shows answers to exercises of its phase: the reader is told which of them
    are open."""
    if what is None:
        raise CourseError("say which: `break N` plants a bug of chapter N, `break --list` shows all of them")
    state = State(course)
    its = bugs.choose(course, what)
    bug = next((each for each in its if not state.of(each.key).passed), its[0])
    if said := bugs.plant(course, bug, grade):
        out.print(said)
    state.update(bug.key, result="planted")
    if changed := bugs.changed(course, bug):
        out.print(f"Changed since the last commit, and taken for sound code: {changed}.", soft_wrap=True)
    out.print(f"Bug {bug.id} is planted in a copy of {bug.package}, in workspace/bug/. The report says:\n")
    out.print(f"{bug.symptom}\n")
    if grade == 1:
        out.print(f"Write a test that shows it into {bugs.OWN}, then mend it; `break --check` judges both.\n")
    if grade == 3:
        out.print(f"It is in workspace/bug/{bug.file}.\n")
    begun = (each for each in workspace.begun(course) if each.package == bug.package and "/lab/" not in each.file)
    if left := [each.id for each in begun if not state.of(each.id).passed]:
        out.print(f"The copy holds the reference's answers to {', '.join(left)}: leave those closed.\n")
    server = "-m phase6_integration.cli serve --check-invariants"
    for command, what in (
        ("break --test", "your test with the bug") if grade == 1 else ("break --run", "its reproduction, repro.py"),
        (f"run {bug.package[5]}", "the phase's demo with the bug"),
        ("break --run -m MODULE ARG...", "any module with the bug, such as a lab"),
        (f"break --run -m pytest tests/{bug.package}", "the project's tests: they name what fails, which says much"),
        (f"break --run {server}", "the server with the bug"),
        ("break --hint", "when you are stuck"),
        (
            "break --check",
            "whether the test shows it, and whether it is mended" if grade == 1 else "whether it is mended",
        ),
    ):
        out.print(f"  python -m chapters {command:<45}  {what}", soft_wrap=True)
    return 0


def _list(course: Course, out: Console) -> int:
    """Print the state of each bug, and nothing that would give it away."""
    state = State(course)
    for bug in bugs.every(course):
        known = state.of(bug.key)
        hints = f"{known.hints} hints" if known.hints else ""
        out.print(f"{bug.id:<5}{'mended' if known.passed else known.result or '-':<12}{hints}".rstrip())
    return 0


def _check(course: Course, bug: Bug, timeout: float, out: Console) -> int:
    state, files, tests = State(course), bugs.files(course), [*bug.tests]
    by_symptom = bugs.grade(course) == 1
    if by_symptom:
        written = bugs.written_test(course)
        if problem := checking.unreadable({bugs.OWN: written}) or checking.shows(course, bug, written, timeout):
            out.print(f"Your test does not show bug {bug.id}: {problem}.", soft_wrap=True)
            return 1
        out.print("Your test fails with the bug and passes without it.")
        tests.append(bugs.OWN)
    with out.status("running the tests"):
        mend = checking.mend(course, bug, files, tests, timeout)
    if not mend.ok:
        state.record(bug.key, "not mended")
        out.print(f"Bug {bug.id} is not mended.")
        for line in _verdicts(mend, by_symptom):
            out.print(line, soft_wrap=True)
        return 1
    state.record(bug.key, "mended")
    backup = course.name(back_up(course, [bugs.folder(course)]))
    out.print(f"Mended: {mend.passed} tests pass. The files are in {backup}/.\n")
    return _reveal(course, bug, out)


def _verdicts(mend: checking.Mend, by_symptom: bool) -> Iterator[str]:
    """What is wrong with a mend. In a hunt by symptom the tests of the symptom have no names: they would lead to its
    place."""
    if mend.broken:
        yield mend.broken
        return
    if by_symptom:
        yield f"Your test still fails: {mend.own}" if mend.own else "Your test passes now."
    if mend.symptom:
        yield f"Tests of the symptom that fail: {len(mend.symptom)}{'.' if by_symptom else ':'}"
        yield from () if by_symptom else mend.symptom[:5]
    if mend.new:
        yield f"Tests that passed with the bug and fail now: {len(mend.new)}:"
        yield from mend.new[:5]


def _reveal(course: Course, bug: Bug, out: Console) -> int:
    """Print what the bug was, where it shipped, and the lines that mend it."""
    out.print(Text(f"Bug {bug.id}: {bug.title}", style="bold"))
    out.print(f"{bug.explanation}\n\nWhere it shipped:")
    for source in bug.sources:
        out.print(f"- {source}", soft_wrap=True)
    reference = (course.root / bug.file).read_text(encoding="utf-8")
    lines = bug.planted(reference).splitlines(), reference.splitlines()
    out.print()
    print_diff(list(difflib.unified_diff(*lines, f"{bug.file} with the bug", bug.file, n=2, lineterm="")), out)
    return 0


def quiz(course: Course, args: argparse.Namespace, out: Console) -> int:
    """Ask the questions of a chapter; print them where there is no terminal, with their answers if asked to."""
    questions = quizzes.load(course, args.chapter)
    asks = sys.stdin.isatty() and not args.answers
    if not asks and not args.answers:
        out.print(f"`quiz {args.chapter}` in a terminal asks them; `quiz {args.chapter} --answers` explains them.\n")
    right = 0
    for number, question in enumerate(questions, 1):
        out.print(Text(f"{number}. {question.text}", style="bold"))
        for line in question.offered:
            _indented(line, out)
        out.print()
        if asks:
            given = question.answer(out.input)
            correct = question.is_right(given)
            right += correct
            out.print(Text("Right." if correct else "Not quite.", style="green" if correct else "red"))
        if asks or args.answers:
            for line in question.explained(given if asks else ""):
                _indented(line, out)
            out.print()
    if asks:
        result, key, state = f"{right}/{len(questions)}", f"quiz {args.chapter}", State(course)
        state.update(key, result=result, passed=state.of(key).passed or right == len(questions))
        out.print(f"{result} right.")
    return 0


def _indented(text: str, out: Console) -> None:
    out.print(Padding(Text(text), (0, 0, 0, 3)))

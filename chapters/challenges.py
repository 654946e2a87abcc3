"""The commands `break` and `quiz`: each prints its results and returns its exit code."""

from __future__ import annotations

import argparse
import difflib
import os
import sys
from collections.abc import Sequence

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from chapters import answers, bugs, exercises, overlay
from chapters import quiz as quizzes
from chapters.bugs import Bug
from chapters.course import Course, CourseError
from chapters.testing import run_tests
from chapters.workspace import State


def break_it(course: Course, args: argparse.Namespace, out: Console) -> int:
    if args.gate:
        return _gate(course, args, out)
    if args.list:
        return _list(course, out)
    if args.program is not None:
        return _run(course, args.program)
    if args.check:
        return _check(course, args.timeout, out)
    if args.hint:
        return _hint(course, out)
    if args.reveal:
        return _reveal(course, bugs.current(course), out)
    if args.stop:
        bug = bugs.current(course)
        out.print(f"Bug {bug.id} is put away. The files are in {course.name(bugs.put_away(course))}/.")
        return 0
    return _plant(course, args.bug, args.anyway, out)


def _plant(course: Course, what: str | None, anyway: bool, out: Console) -> int:
    """Plant the bug with this id, or the next of this phase that is not mended. The copy shows the answers to the
    phase's exercises, so those come first."""
    if what is None:
        raise CourseError("say which: `break N` plants a bug of phase N, `break --list` shows all of them")
    state = State(course)
    if what.isdecimal():
        its = bugs.load(course, course.phase(int(what)))
        if not its:
            raise CourseError(f"phase {what} has no bugs")
        bug = next((each for each in its if not state.of(each.key).passed), its[0])
    else:
        bug = bugs.find(course, what)
    shown = [each.id for each in exercises.load(course, course.phase(bug.phase)) if "/lab/" not in each.file]
    if not anyway and (left := [id for id in shown if not state.of(id).passed]):
        ask = f"solve those first, or go on with `break {what} --anyway`"
        raise CourseError(f"the copy holds the reference's answers to {', '.join(left)}; {ask}")
    bugs.plant(course, bug)
    state.update(bug.key, result="planted")
    out.print(f"Bug {bug.id} is planted in a copy of phase {bug.phase}, in workspace/bug/. The report says:\n")
    out.print(f"{bug.symptom}\n")
    server = "-m phase6_integration.cli serve --check-invariants"
    for command, what in (
        ("break --run", "its reproduction, workspace/bug/repro.py"),
        (f"run {bug.phase}", "the phase's demo with the bug"),
        ("break --run -m MODULE ARG...", "any module with the bug: a lab, pytest"),
        (f"break --run {server}", "the server with the bug"),
        ("break --hint", "when you are stuck"),
        ("break --check", "whether it is mended"),
    ):
        out.print(f"  python -m chapters {command:<34}  {what}", soft_wrap=True)
    return 0


def _list(course: Course, out: Console) -> int:
    """Print the state of each bug, and nothing that would give it away."""
    state = State(course)
    for phase in course.phases():
        for number, bug in enumerate(bugs.load(course, phase)):
            known = state.of(bug.key)
            hints = f"{known.hints} hints" if known.hints else ""
            if number == 0:
                out.print(phase.package)
            out.print(f"{bug.id}  {'mended' if known.passed else known.result or '-':<12}{hints}".rstrip())
    return 0


def _run(course: Course, arguments: Sequence[str]) -> int:
    """Become `python ARGUMENTS`, by default the reproduction, with the planted bug here and in child processes."""
    bugs.current(course)
    command = arguments or [course.name(bugs.folder(course) / "repro.py")]
    sys.stdout.flush()
    environment = overlay.environment(course.root, os.environ, bugs.folder(course))
    return os.execve(sys.executable, [sys.executable, *command], environment)


def run(course: Course, args: argparse.Namespace, out: Console) -> int:
    """Run a phase: with the bug, if one of this phase is planted, and otherwise with the workspace."""
    package = course.phase(args.phase).package
    if (bugs.folder(course) / package).is_dir():
        return _run(course, ["-m", package, *args.arguments])
    return answers.run(course, args, out)


def _check(course: Course, timeout: float, out: Console) -> int:
    bug, state = bugs.current(course), State(course)
    for path in bugs.folder(course).rglob("*.py"):
        try:
            compile(path.read_bytes(), course.name(path), "exec", dont_inherit=True)
        except SyntaxError as error:
            raise CourseError(f"{error.filename}:{error.lineno}: {error.msg}") from None
    with out.status("running the tests"):
        run = run_tests(course, bug.tests, timeout=timeout, overlay=bugs.folder(course))
    failures = list(bugs.failing(run))
    passed = sum(result.outcome == "passed" for result in run.results)
    if failures or not passed:
        state.update(bug.key, result="not mended")
        out.print(f"Bug {bug.id} is not mended: {len(failures)} of its tests fail.")
        for line in failures[:5] or [run.last_line]:
            out.print(line, soft_wrap=True)
        return 1
    state.update(bug.key, result="mended", passed=True)
    out.print(f"Mended: {passed} tests pass. The files are in {course.name(bugs.put_away(course))}/.\n")
    return _reveal(course, bug, out)


def _hint(course: Course, out: Console) -> int:
    bug, state = bugs.current(course), State(course)
    seen = min(state.of(bug.key).hints + 1, len(bug.hints))
    state.update(bug.key, hints=seen)
    for number, text in enumerate(bug.hints[:seen], 1):
        out.print(f"Hint {number} of {len(bug.hints)}: {text}")
    if seen == len(bug.hints):
        out.print("`break --reveal` shows the bug.")
    return 0


def _reveal(course: Course, bug: Bug, out: Console) -> int:
    """Print what the bug was, where it shipped, and the lines that mend it."""
    out.print(Text(f"Bug {bug.id}: {bug.title}", style="bold"))
    out.print(bug.explanation)
    out.print("\nWhere it shipped:")
    for source in bug.sources:
        out.print(f"- {source}", soft_wrap=True)
    reference = (course.root / bug.file).read_text(encoding="utf-8")
    lines = bug.planted(reference).splitlines(), reference.splitlines()
    styles = {"+": "green", "-": "red", "@": "cyan"}
    out.print()
    for line in difflib.unified_diff(*lines, f"{bug.file} with the bug", bug.file, n=2, lineterm=""):
        out.print(Text(line, style=styles.get(line[:1], "")), soft_wrap=True)
    return 0


def _gate(course: Course, args: argparse.Namespace, out: Console) -> int:
    its = bugs.every(course) if args.bug is None else [bug for bug in bugs.every(course) if bug.id.startswith(args.bug)]
    if not its:
        raise CourseError("there are no bugs to prove")
    ok = True
    for verdict in bugs.gate(course, its, args.timeout):
        ok = ok and not verdict.problem
        result = f"failed: {verdict.problem}" if verdict.problem else f"passed: caught by {verdict.bug.tests[0]}"
        out.print(f"{verdict.bug.id} {result} ({verdict.seconds:.1f} s)", soft_wrap=True)
    return 0 if ok else 1


def quiz(course: Course, args: argparse.Namespace, out: Console) -> int:
    questions = quizzes.load(course, args.chapter)
    if args.answers:
        for number, question in enumerate(questions, 1):
            _ask(number, question, out)
            _explain(question, out)
        return 0
    asks = sys.stdin.isatty()
    right = 0
    if not asks:
        out.print(f"`quiz {args.chapter}` in a terminal asks them; `quiz {args.chapter} --answers` explains them.\n")
    for number, question in enumerate(questions, 1):
        _ask(number, question, out)
        if asks:
            given = question.answer(out.input)
            correct = question.is_right(given)
            right += correct
            out.print(Text("Right." if correct else "Not quite.", style="green" if correct else "red"))
            _explain(question, out, given)
    if not asks:
        return 0
    result, key = f"{right}/{len(questions)}", f"quiz {args.chapter}"
    state = State(course)
    state.update(key, result=result, passed=state.of(key).passed or right == len(questions))
    out.print(f"{result} right.")
    return 0


def _ask(number: int, question: quizzes.Question, out: Console) -> None:
    out.print(Text(f"{number}. {question.text}", style="bold"))
    for letter, choice in question.lettered:
        _indented(f"{letter}) {choice.text}", out)
    if question.number is not None:
        _indented(f"(a number{f', in {question.unit}' if question.unit else ''})", out)
    out.print()


def _explain(question: quizzes.Question, out: Console, given: str = "") -> None:
    """The right answer and why; the other choices, or only the one that was given, and why not."""
    if question.number is not None:
        _indented(f"{question.number:g} {question.unit}".rstrip() + f". {question.why}", out)
    for letter, choice in question.lettered:
        if choice.right or not given or letter == given.lower():
            _indented(f"{letter}) {'right' if choice.right else 'no'}: {choice.why}", out)
    out.print()


def _indented(text: str, out: Console) -> None:
    out.print(Padding(Text(text), (0, 0, 0, 3)))

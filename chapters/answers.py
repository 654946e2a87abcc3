"""The commands that run a workspace: check, watch, run and mine."""

from __future__ import annotations

import argparse
import itertools
import os
import re
import shutil
import sys
import textwrap
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from rich.console import Console
from rich.text import Text

from chapters import checking, overlay, testing, workspace
from chapters.course import Course, CourseError, Phase
from chapters.exercises import Exercise, answer_lines, find, load

_STYLES = {"passed": "green", "failed": "bold red", "region missing": "red", "syntax error": "red"}
_LINES = 14  # of one part of a failure, so that the whole fits on a screen
_COLUMNS = 110  # of a line; longer ones are wrapped


def check(course: Course, args: argparse.Namespace, out: Console) -> int:
    its = _chosen(course, args.target)
    with testing.Runners(course, min(len(its), testing.AT_ONCE)) as runners:
        return _check(course, its, runners, args.timeout, out)


def _chosen(course: Course, target: str | None) -> list[Exercise]:
    """The exercises of the workspace that `N`, `N.M` or nothing names."""
    if target and not re.fullmatch(r"\d+(\.\d+)?", target):
        raise CourseError(f"a phase is a number, an exercise N.M, not '{target}'")
    if target and "." in target:
        exercise = find(course, target)
        _started(course, exercise.phase)
        return [exercise]
    return [each for phase in _started(course, int(target) if target else None) for each in load(course, phase)]


def _started(course: Course, number: int | None) -> tuple[Phase, ...]:
    """The phases in the workspace: the given one, or all."""
    started = workspace.started_phases(course)
    wanted = started if number is None else (course.phase(number),)
    if not wanted or wanted[0] not in started:
        what = "there is no workspace yet" if number is None else f"phase {number} is not in the workspace"
        raise CourseError(f"{what}: `python -m chapters start {'N' if number is None else number}` creates it")
    return wanted


def _check(course: Course, its: Sequence[Exercise], runners: testing.Runners, timeout: float, out: Console) -> int:
    """Judge each exercise alone, show the first failure of each phase, and run together what passes alone."""
    ok = True
    for _, group in itertools.groupby(its, key=lambda exercise: exercise.phase):
        judged = []
        for one in checking.judge_all(course, list(group), runners, timeout):
            out.print(_row(one), soft_wrap=True)
            judged.append(one)
        fine = all(one.ok for one in judged)
        failed = next((one for one in judged if one.failure), None)
        if failed:
            _explain(course, failed, out)
        passed = [one.exercise for one in judged if one.status == "passed"]
        if len(passed) > 1 and fine:
            problem = checking.together(course, passed, runners, timeout)
            fine = not problem
            result = f"failed: {problem}" if problem else "passed"
            out.print(f"{', '.join(exercise.id for exercise in passed)} together: {result}", soft_wrap=True)
        ok &= fine
    return 0 if ok else 1


def _row(one: checking.Judged) -> Text:
    return Text.assemble(
        f"{one.exercise.id:<5}{one.exercise.title:<39} ",
        (f"{one.status:<15}", _STYLES.get(one.status, "dim")),
        one.note,
    )


def _explain(course: Course, one: checking.Judged, out: Console) -> None:
    """A failure in one screen: what the test says, what it was given, expected and got, and where."""
    assert one.failure
    details, id = one.failure.details, one.exercise.id
    out.print(Text(f"\n{id}: {checking.in_words(one.failure.id)}", style="bold"), soft_wrap=True)
    rows = [("given", f"{name} = {value}") for name, value in details.get("given", {}).items()]
    rows += [("given", details["example"])] if details.get("example") else []
    if details.get("statement"):
        rows.append(("test", f"{details['statement']}\n{one.failure.id.partition('::')[0]}:{details['line']}"))
    rows.append(("found", details.get("message") or one.failure.error))
    rows += [("your code", place) for place in one.places[-3:]]
    rows += [] if one.places else [("begins at", workspace.place(course, one.exercise))]
    rows += [("at the end", picture) for picture in details.get("pictures", ())]
    for name, text in rows:
        lines = [line for line in text.split("\n") if line.strip() and "Use -v to get" not in line]
        if len(lines) > _LINES:  # of an example, its start and the last steps matter
            first = 3 if name == "given" else _LINES - 1
            lines = [*lines[:first], "...", *lines[len(lines) - (_LINES - 1 - first) :]]
        wrapped = [piece for line in lines for piece in textwrap.wrap(line, _COLUMNS, subsequent_indent="  ")]
        out.print(f"  {name:<11}" + f"\n{'':13}".join(wrapped), soft_wrap=True)
    out.print(f"The output of pytest: {course.name(checking.log(course, id))}. A hint: python -m chapters hint {id}\n")


def watch(course: Course, args: argparse.Namespace, out: Console) -> int:
    """Check, then judge again each exercise that a save changes."""
    its = _chosen(course, args.target)
    with testing.Runners(course, 1) as runners:
        saved, before = _saved(course), [workspace.content(course, each) for each in its]
        _check(course, its, runners, args.timeout, out)
        runners.prepare(test for exercise in its for test in exercise.tests)
        while True:
            out.print("Watching the workspace; Ctrl-C ends.")
            changed: list[Exercise] = []
            while not changed:
                while _saved(course) == saved:
                    time.sleep(0.1)
                saved, now = _saved(course), [workspace.content(course, each) for each in its]
                changed = [each for each, old, new in zip(its, before, now, strict=True) if old != new]
                before = now
            _check(course, changed, runners, args.timeout, out)


def _saved(course: Course) -> list[tuple[str, int]]:
    """The files of the workspace and when each was saved."""
    with suppress(FileNotFoundError):  # an editor may replace files in between
        return [(str(path), path.stat().st_mtime_ns) for path in course.workspace.rglob("*.py")]
    return []


def run(course: Course, args: argparse.Namespace, out: Console) -> int:
    phases = _started(course, args.phase)
    return _execute(course, phases, course.private / "run", [phases[0].package, *args.arguments], out)


def mine(course: Course, args: argparse.Namespace, out: Console) -> int:
    wanted = ["bench", *args.passed_on] if args.passed_on[:1] == ["ladder"] else ["serve", *args.passed_on]
    command = ["phase6_integration.cli", *wanted]
    return _execute(course, _started(course, None), course.private / "mine", command, out, say=True)


def _execute(
    course: Course, phases: Iterable[Phase], folder: Path, command: Sequence[str], out: Console, say: bool = False
) -> int:
    """Become `python -m` with the workspace's answers in place of the reference, here and in its child processes."""
    stages = [workspace.attempt(course, each) for phase in phases for each in load(course, phase)]
    broken = [each for each in stages if each.stage in ("syntax error", "region missing")]
    if broken:
        for each in broken:
            out.print(_row(checking.Judged(each.exercise, each.stage, each.note)), soft_wrap=True)
        return 1
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    written = [each.exercise for each in stages if each.stage == "attempted"]
    workspace.assemble(course, written, folder)
    if say:
        lines = sum(answer_lines(course.workspace, each) for each in written)
        names = ", ".join(each.id for each in written) or "nothing yet"
        out.print(f"Yours: {names} ({lines} lines of code). The rest is the reference.", soft_wrap=True)
    sys.stdout.flush()
    environment = overlay.environment(course.root, os.environ, folder)
    return os.execve(sys.executable, [sys.executable, "-m", *command], environment)

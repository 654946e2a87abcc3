"""Judges exercises by their tests: `check` runs a workspace, the gate runs the reference with each change to it that
a test must catch."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from chapters.answers import Answer
from chapters.bugs import OWN, Bug
from chapters.course import Course
from chapters.events import Result, shorten
from chapters.exercises import Exercise, blanked
from chapters.source import find_regions
from chapters.testing import Run, at_once, copy_checkout, run_tests
from chapters.workspace import State, answered, attempt, fingerprint, workspace_line

PLACE = re.compile(r"(phase\d_\w+/[\w/]+\.py)(?::|\", line )(\d+)")  # in a traceback, or in the stack of a thread
FRAME = re.compile(r"^(phase\d_\w+/[\w/]+\.py):(\d+)(: in .*\n)(?:    .*(?:\n|\Z))+", re.MULTILINE)  # with its source


@dataclass(frozen=True)
class Judged:
    """An exercise with its result: passed, failed, skipped, not begun, or what is wrong with its file. `failure` is
    the first test that failed, with its text as the reader is to see it."""

    exercise: Exercise
    status: str
    note: str = ""
    failure: Result | None = None

    @property
    def ok(self) -> bool:
        return self.status in ("passed", "skipped", "not begun")


def judge_all(course: Course, exercises: Sequence[Exercise], timeout: float) -> Iterator[Judged]:
    """Judge each exercise alone; yields the results in order."""
    answers = {exercise.id: fingerprint(course, exercise) for exercise in exercises}
    for judged in at_once(lambda exercise: judge(course, exercise, timeout), exercises):
        State(course).record(judged.exercise.id, judged.status, answers[judged.exercise.id])
        yield judged


def judge(course: Course, exercise: Exercise, timeout: float) -> Judged:
    """Run the exercise's tests with the workspace's answer to it, and the reference elsewhere."""
    stage, note = attempt(course, exercise)
    if stage != "attempted":
        return Judged(exercise, stage, note)
    run = _run(course, [exercise], timeout, exercise.id)
    passed = run.count("passed")
    if run.stopped:
        return Judged(exercise, "failed", run.stopped)
    if run.failures:
        return Judged(exercise, "failed", f"{passed} of {run.collected} tests pass before one fails", run.failures[0])
    if not run.results:
        return Judged(exercise, "failed", f"no test of it ran: {shorten(run.last_line)}")
    if not passed:
        return Judged(exercise, "skipped", shorten(run.results[0].error))
    skipped = run.count("skipped")
    count = f"{passed} of {run.collected - skipped} tests pass" + (f", {skipped} are skipped" if skipped else "")
    return Judged(exercise, "passed", count)


def together(course: Course, exercises: Sequence[Exercise], timeout: float) -> str:
    """Run the tests of all these exercises with all their answers: what fails, or an empty text."""
    run = _run(course, exercises, timeout, f"{exercises[0].chapter}")
    return run.stopped or next((result.line for result in run.failures), "")


def log(course: Course, name: str) -> Path:
    """The output of pytest when it last judged an exercise, or a chapter's exercises together."""
    return course.private / "check" / f"{name}.txt"


def _run(course: Course, exercises: Sequence[Exercise], timeout: float, name: str) -> Run:
    """Run the tests of these exercises with their answers, up to the first failure. Places in an answer become lines
    of the workspace, and lines of the reference's answers to other exercises are not shown."""
    copy = copy_checkout(course, course.private / "check" / name, answered(course, exercises))
    tests = dict.fromkeys(test for exercise in exercises for test in exercise.tests)
    run = run_tests(copy, tests, timeout=timeout, stop_at="", log=log(course, name))

    def hide(match: re.Match[str]) -> str:
        file, line, function = match.groups()
        for region, pieces in find_regions((copy / file).read_text(encoding="utf-8"), file).items():
            inside = any(piece.first < int(line) - 1 < piece.last for piece in pieces)
            if inside and region.startswith("exercise ") and all(region != each.region for each in exercises):
                return f"{file}:{line}{function}    # the answer of {region}\n"
        return match[0]

    def place(match: re.Match[str]) -> str:
        return workspace_line(course, copy, match[1], int(match[2])) or match[0]

    log(course, name).write_text(FRAME.sub(hide, run.output), encoding="utf-8")
    if run.stopped:
        inside = (workspace_line(course, copy, file, int(line)) for file, line in PLACE.findall(run.output))
        where = next(filter(None, inside), "")
        return replace(run, stopped=f"{run.stopped}, at {where}" if where else run.stopped)
    results = (replace(r, text=PLACE.sub(place, FRAME.sub(hide, r.text))) for r in run.results)
    return replace(run, results=tuple(results))


# The gate


@dataclass(frozen=True)
class Change:
    """A change to a file of the reference that one of these tests must catch: its failure contains `named`."""

    id: str
    file: str
    text: str
    tests: Sequence[str]
    named: str = ""


def blank(course: Course, exercise: Exercise) -> Change:
    text = blanked(course, exercise.file, [exercise])
    return Change(exercise.id, exercise.file, text, exercise.tests, exercise.named)


def planted(course: Course, bug: Bug, tells: bool = False) -> Change:
    text = bug.planted((course.root / bug.file).read_text(encoding="utf-8"), tells)
    return Change(bug.id, bug.file, text, bug.tests[:1])


def unreadable(files: Mapping[str, str]) -> str:
    """The first of the planted bug's files that Python cannot parse, with the line; nothing if it can parse all."""
    for name, text in files.items():
        try:
            compile(text, name, "exec", dont_inherit=True)
        except (SyntaxError, ValueError) as error:
            folder = "" if name.startswith("workspace/") else "workspace/bug/"
            return f"{folder}{name}:{getattr(error, 'lineno', None) or '?'}: {getattr(error, 'msg', error)}"
    return ""


def _run_in_copy(course: Course, files: Mapping[str, str], tests: Sequence[str], timeout: float) -> Run:
    return run_tests(copy_checkout(course, course.private / "bug", files), tests, timeout=timeout)


def shows(course: Course, bug: Bug, written: str, timeout: float) -> str:
    """Why this test of a reader does not show a bug; nothing if it passes on the sound code and fails with the bug."""
    change = planted(course, bug)

    def run(files: Mapping[str, str]) -> Run:
        return _run_in_copy(course, {OWN: written, **files}, [OWN], timeout)

    sound = run({})
    if sound.stopped or sound.failures or not sound.count("passed"):
        why = sound.stopped or next((result.error for result in sound.failures), sound.last_line)
        return f"it does not pass on the sound code: {shorten(why)}"
    wrong = run({change.file: change.text})
    return "" if wrong.stopped or wrong.failures else "it passes with the bug, too"


@dataclass(frozen=True)
class Mend:
    """What the tests say of a mend: how the reader's own test fails, which tests of the symptom still fail, and which
    passed with the bug. `broken` is what kept them from running."""

    passed: int
    own: str = ""
    symptom: Sequence[str] = ()
    new: Sequence[str] = ()
    broken: str = ""

    @property
    def ok(self) -> bool:
        return self.passed > 0 and not (self.own or self.symptom or self.new or self.broken)


def mend(course: Course, bug: Bug, files: Mapping[str, str], tests: Sequence[str], timeout: float) -> Mend:
    """Run tests with the reader's files. If some fail, run them with the bug, too: which of them are new?"""
    if problem := unreadable(files):
        return Mend(0, broken=problem)
    run = _run_in_copy(course, files, tests, timeout)
    passed = run.count("passed")
    broken = next((result for result in run.failures if result.outcome == "broken"), None)
    if run.stopped or broken or not run.results:
        text, error = (broken.text, broken.error) if broken else (run.output, run.stopped or run.last_line)
        places = [f"{file}:{line}" for file, line in PLACE.findall(text) if file in files]
        where = f", at workspace/bug/{places[0 if run.stopped else -1]}" if places else ""
        return Mend(passed, broken=(error.rpartition(": ")[2] if run.stopped else error) + where)
    own = next((result.error for result in run.failures if result.id.startswith(OWN)), "")
    others = [result for result in run.failures if not result.id.startswith(OWN)]
    change, known = planted(course, bug), set[str]()
    if others:
        wrong = _run_in_copy(course, {change.file: change.text}, bug.tests, timeout)
        known = {result.id for result in wrong.failures}
    symptom = [result.line for result in others if result.id in known]
    return Mend(passed, own, symptom, [result.line for result in others if result.id not in known])


@dataclass(frozen=True)
class Verdict:
    """The gate's result for one change: the test that caught it, or the problem."""

    id: str
    test: str
    problem: str
    seconds: float


def gate(course: Course, changes: Sequence[Change], timeout: float) -> Iterator[Verdict]:
    """Make each change in a copy of its own: a test must fail because of it. That these tests pass without it is shown
    by the suite. Yields the verdicts in order."""

    def verdict(change: Change) -> Verdict:
        copy = copy_checkout(course, course.private / "gate" / change.id, {change.file: change.text})
        run = run_tests(copy, change.tests, timeout=timeout, stop_at=change.named)
        caught = (r for r in run.results if r.outcome == "failed" and change.named in r.text)
        test = next((result.id for result in caught), "")
        shutil.rmtree(copy, ignore_errors=True)
        return Verdict(change.id, test, "" if test else _missed(run), run.seconds)

    yield from at_once(verdict, changes)


def accept(course: Course, given: Sequence[tuple[Exercise, Answer]], timeout: float) -> Iterator[Verdict]:
    """Judge each of these right answers in a copy of its own: all tests of its exercise must pass."""

    def verdict(pair: tuple[Exercise, Answer]) -> Verdict:
        exercise, answer = pair
        where = course.private / "gate" / f"{exercise.id} {given.index(pair)}"
        copy = copy_checkout(course, where, {exercise.file: answer.text(course, exercise)})
        run = run_tests(copy, exercise.tests, timeout=timeout, stop_at="")
        shutil.rmtree(copy, ignore_errors=True)
        problem = run.stopped or next((result.line for result in run.failures), "")
        if not problem and not run.count("passed"):
            problem = f"no test ran: {run.last_line}"
        return Verdict(f"{exercise.id}, {answer.way},", "", problem, run.seconds)

    yield from at_once(verdict, given)


def _missed(run: Run) -> str:
    if run.stopped:
        return f"the run stopped in {run.stopped}"
    if run.failures:
        return f"a test fails for another reason: {run.failures[0].line}"
    if not run.count("passed"):
        return f"no test ran: {run.last_line}"
    return f"all of its {len(run.results)} tests pass"

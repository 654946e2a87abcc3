"""Judges exercises by their tests: `check` runs a workspace, the gate runs the reference with each exercise blanked."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from chapters.course import Course
from chapters.exercises import Exercise, blanked
from chapters.testing import Result, Run, Runners, shorten
from chapters.workspace import Attempt, State, assemble, attempt, fingerprint, workspace_line


@dataclass(frozen=True)
class Judged:
    """An exercise with its result: passed, failed, skipped, not begun, or what is wrong with its file. `failure` is the
    first test that failed, `places` the lines of the workspace that it went through, innermost last."""

    exercise: Exercise
    status: str
    note: str = ""
    failure: Result | None = None
    places: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        return self.status in ("passed", "skipped", "not begun")


def judge_all(course: Course, exercises: Sequence[Exercise], runners: Runners, timeout: float) -> Iterator[Judged]:
    """Judge each exercise alone; yields the results in order."""
    with ThreadPoolExecutor(runners.size) as pool:
        try:
            answers = {exercise.id: fingerprint(course, exercise) for exercise in exercises}
            for judged in pool.map(lambda exercise: judge(course, exercise, runners, timeout), exercises):
                State(course).record(judged.exercise.id, judged.status, answers[judged.exercise.id])
                yield judged
        except BaseException:
            runners.close()
            raise


def judge(course: Course, exercise: Exercise, runners: Runners, timeout: float) -> Judged:
    """Run the exercise's tests with the workspace's answer to it, and the reference elsewhere."""
    found = attempt(course, exercise)
    if found.stage not in ("attempted", "partly written"):
        return Judged(exercise, found.stage, found.note)
    every = found.stage == "partly written"
    return _judged(course, found, _run(course, [exercise], runners, timeout, exercise.id, every))


def together(course: Course, exercises: Sequence[Exercise], runners: Runners, timeout: float) -> str:
    """Run the tests of all these exercises with all their answers: what fails, or an empty text."""
    run = _run(course, exercises, runners, timeout, f"{exercises[0].phase}")
    if run.stopped:
        return f"{run.where}: {run.stopped}"
    return run.failures[0].line if run.failures else ""


def in_words(nodeid: str) -> str:
    """A test's name as a sentence: what it demands."""
    *_, case, name = ("", *nodeid.split("::"))
    name, bracket, parameters = (case if name == "runTest" else name).partition("[")
    return f"{name.removeprefix('test_').replace('_', ' ')} {bracket}{parameters}".strip()


def log(course: Course, name: str) -> Path:
    """The output of pytest when it last judged an exercise, or a phase's exercises together."""
    return course.private / "check" / f"{name}.txt"


def _run(
    course: Course, exercises: Sequence[Exercise], runners: Runners, timeout: float, name: str, every: bool = False
) -> Run:
    """Run the tests of these exercises with their answers, up to the first failure or `every` one. If the run was
    stopped inside the workspace's code, `stopped` names the line."""
    overlay = course.private / "check" / name
    shutil.rmtree(overlay, ignore_errors=True)
    assemble(course, exercises, overlay)
    tests = dict.fromkeys(test for exercise in exercises for test in exercise.tests)
    options = [] if every else ["--maxfail=1"]
    run = runners.run(tests, timeout=timeout, overlay=overlay, options=options)
    log(course, name).write_text(f"{run.output}{run.stack}", encoding="utf-8")
    inside = re.escape(f"{overlay.relative_to(course.root)}{os.sep}")
    frames = re.findall(rf'File ".*{inside}(.+?)", line (\d+)', run.stack)
    lines = (workspace_line(course, overlay, Path(file), int(line)) for file, line in frames)
    place = next(filter(None, lines), "")
    return replace(run, stopped=f"{run.stopped}, at {place}") if run.stopped and place else run


def _judged(course: Course, found: Attempt, run: Run) -> Judged:
    exercise = found.exercise
    if run.stopped:
        return Judged(exercise, "failed", f"{run.where}: {run.stopped}")
    passed = sum(result.outcome == "passed" for result in run.results)
    skipped = sum(result.outcome == "skipped" for result in run.results)
    count = f"{passed} of {len(run.collected) - skipped} tests pass" + (f", {skipped} are skipped" if skipped else "")
    failures = [result for result in run.failures if exercise.id not in result.exercises]
    if failures:
        first, overlay = failures[0], course.private / "check" / exercise.id
        frames = first.details.get("frames", ())
        places = [(workspace_line(course, overlay, Path(file), line), name) for file, line, name in frames]
        note = (
            f"{found.note}; {count}" if found.note else f"{passed} of {len(run.collected)} tests pass before one fails"
        )
        return Judged(exercise, "failed", note, first, tuple(f"{place}, in {name}" for place, name in places if place))
    if found.note or run.failures:
        return Judged(exercise, "failed", f"{found.note or run.failures[0].error}; {count}")
    if not run.results:
        return Judged(exercise, "failed", f"no test of it ran: {shorten(run.last_line)}")
    if not passed:
        return Judged(exercise, "skipped", shorten(run.results[0].error))
    return Judged(exercise, "passed", count)


# The gate


@dataclass(frozen=True)
class Verdict:
    """The gate's result for one exercise: the test that caught the blank, or the problem."""

    exercise: Exercise
    test: str
    seconds: float
    problem: str

    @property
    def ok(self) -> bool:
        return not self.problem


def gate(course: Course, exercises: Sequence[Exercise], timeout: float) -> Iterator[Verdict]:
    """Prove that a test catches each exercise when it is blank: one of its tests fails, the failure names the exercise,
    and the same test passes against the reference. Yields the verdicts in order."""
    with Runners(course) as runners, ThreadPoolExecutor(runners.size) as pool:
        try:
            runs = list(pool.map(lambda exercise: _blanked(course, exercise, runners, timeout), exercises))
            caught = [
                next((result.id for result in run.results if exercise.id in result.exercises), "")
                for exercise, run in zip(exercises, runs, strict=True)
            ]
            reference = runners.run(dict.fromkeys(filter(None, caught)), timeout=timeout * len(exercises))
        except BaseException:
            runners.close()
            raise
    for exercise, run, test in zip(exercises, runs, caught, strict=True):
        yield Verdict(exercise, test, run.seconds, _problem(test, reference) if test else _missed(run))


def _blanked(course: Course, exercise: Exercise, runners: Runners, timeout: float) -> Run:
    with tempfile.TemporaryDirectory(prefix="course-") as scratch:
        target = Path(scratch) / exercise.file
        target.parent.mkdir(parents=True)
        target.write_text(blanked(course, exercise.file, [exercise]), encoding="utf-8")
        return runners.run(exercise.tests, timeout=timeout, overlay=Path(scratch), stop_at=exercise.id)


def _problem(test: str, reference: Run) -> str:
    """What is wrong with the test that caught an exercise, when it runs against the reference."""
    result = next((result for result in reference.results if result.id == test), None)
    if result is None:
        return f"{test} did not run against the reference: {reference.stopped or reference.last_line}"
    return "" if result.outcome == "passed" else f"the reference fails {result.line}"


def _missed(run: Run) -> str:
    if run.stopped:
        return f"blank, the run stopped in {run.where}: {run.stopped}"
    if run.broken:
        return f"blank, {run.broken[0].id} cannot be collected: {shorten(run.broken[0].error)}"
    if run.failures:
        return f"blank, a test fails for another reason: {run.failures[0].line}"
    if not any(result.outcome == "passed" for result in run.results):
        return f"blank, no test ran: {run.last_line}"
    return f"blank, all of its {len(run.results)} tests pass"

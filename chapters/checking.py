"""Judging a workspace by the tests of its phase."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from chapters.course import Course, Phase
from chapters.exercises import Exercise
from chapters.testing import Result, Run, run_tests, shorten
from chapters.workspace import Attempt, State, assemble, fresh_folder, learners_line


@dataclass(frozen=True)
class Judged:
    """An exercise and what became of it: passed, failed, skipped, or the stage it stopped at."""

    exercise: Exercise
    status: str
    note: str = ""


@dataclass(frozen=True)
class Report:
    """What `check` found in one phase. `run` is that of the whole phase, if an exercise was written; `others` are its
    failing tests that judge none of the exercises attempted."""

    phase: Phase
    rows: tuple[Judged, ...]
    others: tuple[Result, ...]
    run: Run | None
    log: Path

    @property
    def ok(self) -> bool:
        fine = all(row.status in ("passed", "skipped", "not started") for row in self.rows)
        return fine and not self.others and not (self.run and self.run.stopped)


def check(course: Course, phase: Phase, timeout: float, tell: Callable[[str], object]) -> Report:
    """Run the phase's tests against the workspace, everything else being the reference, and remember the results. If
    a test does not end, or ends the process, what was not reached runs anew, one exercise at a time and the others
    being the reference, so that each is judged by what it does itself. Every run may take `timeout` seconds."""
    folder = fresh_folder(course, "check", phase)
    attempts = assemble(course, phase, folder / "all")
    attempted = [attempt.exercise for attempt in attempts if attempt.stage == "attempted"]
    run = _run(course, _tests(course, phase, attempted), timeout, folder / "all") if attempted else None
    if run and run.stopped:
        tell(f"{run.where}: {run.stopped}.")
    alone: dict[Exercise, Run] = {}
    for exercise in attempted:
        if run and run.stopped and run.collected and not _reached(exercise, run):
            tell(f"Exercise {exercise.id} runs anew, by itself.")
            assemble(course, phase, folder / exercise.id, only=exercise)
            alone[exercise] = _run(course, exercise.tests, timeout, folder / exercise.id)
    rows = tuple(_judge(attempt, alone.get(attempt.exercise, run)) for attempt in attempts)
    state = State(course)
    for row in rows:
        known = state.of(row.exercise.id)
        state.update(row.exercise.id, result=row.status, passed=known.passed or row.status == "passed")
    others = [each for each in (run.failures if run else ()) if not any(concerns(one, each) for one in attempted)]
    return Report(phase, rows, tuple(others), run, folder / "pytest.txt")


def _tests(course: Course, phase: Phase, exercises: Iterable[Exercise]) -> list[str]:
    """The tests of the phase, and the files elsewhere that its exercises name."""
    named = {test.partition("::")[0] for exercise in exercises for test in exercise.tests}
    outside = sorted(file for file in named if not file.startswith(f"{phase.tests}/"))
    return [*([phase.tests] if (course.root / phase.tests).is_dir() else []), *outside]


def _run(course: Course, tests: Iterable[str], timeout: float, overlay: Path) -> Run:
    """Run tests with the overlay and add what was said to the log beside it. If they were stopped in the learner's
    code, `stopped` says at which line."""
    run = run_tests(course, tests, timeout=timeout, overlay=overlay)
    with (overlay.parent / "pytest.txt").open("a", encoding="utf-8") as log:
        log.write(f"{run.output}{run.stack}\n")
    inside = re.escape(f"{overlay.relative_to(course.root)}{os.sep}")
    frames = re.findall(rf'File ".*{inside}(.+?)", line (\d+)', run.stack)
    lines = (learners_line(course, overlay, Path(file), int(line)) for file, line in frames)
    place = next(filter(None, lines), "")
    return replace(run, stopped=f"{run.stopped}, at {place}") if run.stopped and place else run


def concerns(exercise: Exercise, result: Result) -> bool:
    """Whether this result bears on the exercise: one of its tests, or a file of them that could not be collected."""
    return exercise.judged_by(result.id) or any(test.startswith(f"{result.id}::") for test in exercise.tests)


def _reached(exercise: Exercise, run: Run) -> bool:
    """Whether every test of the exercise ran to its end."""
    return set(filter(exercise.judged_by, run.collected)) <= {result.id for result in run.results}


def _judge(attempt: Attempt, run: Run | None) -> Judged:
    exercise = attempt.exercise
    if attempt.stage != "attempted" or run is None:
        return Judged(exercise, attempt.stage, attempt.note)
    if run.stopped and not (run.collected and _reached(exercise, run)):
        return Judged(exercise, "failed", f"{run.where}: {run.stopped}")
    mine = [result for result in run.results if exercise.judged_by(result.id)]
    failed = [result for result in run.failures if concerns(exercise, result)]
    if failed:
        more = f" (and {len(failed) - 1} more)" if len(failed) > 1 else ""
        return Judged(exercise, "failed", f"{failed[0].line}{more}")
    if not mine:
        return Judged(exercise, "failed", f"no test of it ran: {shorten(run.last_line)}")
    if all(result.outcome == "skipped" for result in mine):
        return Judged(exercise, "skipped", shorten(mine[0].error))
    return Judged(exercise, "passed", f"{sum(result.outcome == 'passed' for result in mine)} tests")

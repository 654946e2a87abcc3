"""Judges exercises by their tests: `check` runs a workspace, the gate runs the reference with each exercise blanked."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from pathlib import Path

from chapters.course import Course, Phase
from chapters.exercises import Exercise, blanked
from chapters.testing import Result, Run, run_tests, shorten, stop_all
from chapters.workspace import Attempt, State, assemble, attempts, fresh_folder, workspace_line


@dataclass(frozen=True)
class Judged:
    """An exercise with its result: passed, failed, skipped, or the stage at which it stopped before any test."""

    exercise: Exercise
    status: str
    note: str = ""


@dataclass(frozen=True)
class Report:
    """The results of `check` in one phase. `run` ran all its tests, and is None if no exercise was attempted; `others`
    are failing tests that belong to no attempted exercise."""

    phase: Phase
    rows: tuple[Judged, ...]
    others: tuple[Result, ...]
    run: Run | None
    log: Path

    @property
    def ok(self) -> bool:
        fine = all(row.status in ("passed", "skipped", "not begun") for row in self.rows)
        return fine and not self.others and not (self.run and self.run.stopped)


def check(course: Course, phase: Phase, timeout: float, report: Callable[[str], object]) -> Report:
    """Run the phase's tests with the workspace in place of the reference, and store the results. If a test hangs or
    ends the process, each exercise with tests that were not reached runs again on its own, with the reference for all
    others. Every run may take `timeout` seconds; `report` gets a line about each interruption."""
    folder = fresh_folder(course, "check", phase)
    stages = attempts(course, phase)
    attempted = [attempt.exercise for attempt in stages if attempt.stage == "attempted"]
    assemble(course, attempted, folder / "all")
    run = _run(course, _tests(course, phase, attempted), timeout, folder / "all") if attempted else None
    if run and run.stopped:
        report(f"{run.where}: {run.stopped}.")
    alone: dict[Exercise, Run] = {}
    for exercise in attempted:
        if run and run.stopped and run.collected and not _reached(exercise, run):
            report(f"Exercise {exercise.id} runs again, on its own.")
            assemble(course, [exercise], folder / exercise.id)
            alone[exercise] = _run(course, exercise.tests, timeout, folder / exercise.id)
    rows = tuple(_judge(attempt, alone.get(attempt.exercise, run)) for attempt in stages)
    state = State(course)
    for row in rows:
        known = state.of(row.exercise.id)
        state.update(row.exercise.id, result=row.status, passed=known.passed or row.status == "passed")
    others = [each for each in (run.failures if run else ()) if not any(concerns(one, each) for one in attempted)]
    return Report(phase, rows, tuple(others), run, folder / "pytest.txt")


def _tests(course: Course, phase: Phase, exercises: Iterable[Exercise]) -> list[str]:
    """The tests of the phase, and files elsewhere that its exercises name."""
    named = {test.partition("::")[0] for exercise in exercises for test in exercise.tests}
    outside = sorted(file for file in named if not file.startswith(f"{phase.tests}/"))
    return [*([phase.tests] if (course.root / phase.tests).is_dir() else []), *outside]


def _run(course: Course, tests: Iterable[str], timeout: float, overlay: Path) -> Run:
    """Run tests with the overlay and append the output to the log beside it. If the run was stopped inside the
    workspace's code, `stopped` names the line."""
    run = run_tests(course, tests, timeout=timeout, overlay=overlay)
    with (overlay.parent / "pytest.txt").open("a", encoding="utf-8") as log:
        log.write(f"{run.output}{run.stack}\n")
    inside = re.escape(f"{overlay.relative_to(course.root)}{os.sep}")
    frames = re.findall(rf'File ".*{inside}(.+?)", line (\d+)', run.stack)
    lines = (workspace_line(course, overlay, Path(file), int(line)) for file, line in frames)
    place = next(filter(None, lines), "")
    return replace(run, stopped=f"{run.stopped}, at {place}") if run.stopped and place else run


def concerns(exercise: Exercise, result: Result) -> bool:
    """Whether a result counts for the exercise: one of its tests, or a file of them that could not be collected."""
    return exercise.judged_by(result.id) or any(test.startswith(f"{result.id}::") for test in exercise.tests)


def _reached(exercise: Exercise, run: Run) -> bool:
    """Whether every test of the exercise was completed."""
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


# The gate

AT_ONCE = 2


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
    """Prove that a test catches each exercise when it is blank. A phase's tests run once against the reference, which
    must pass, and once for each exercise blanked on its own, where a failure must name it. Yields verdicts as runs
    end."""
    with ThreadPoolExecutor(AT_ONCE) as pool:
        phases: dict[int, list[Exercise]] = {}
        for exercise in exercises:
            phases.setdefault(exercise.phase, []).append(exercise)
        references = {phase: pool.submit(_reference, course, its, timeout * len(its)) for phase, its in phases.items()}
        blanks = {pool.submit(_blanked, course, exercise, timeout): exercise for exercise in exercises}
        try:
            for done in as_completed(blanks):
                exercise = blanks[done]
                yield _verdict(exercise, done.result(), references[exercise.phase].result())
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            stop_all()
            raise


def _reference(course: Course, exercises: Sequence[Exercise], timeout: float) -> Run:
    return run_tests(course, sorted({test for each in exercises for test in each.tests}), timeout=timeout)


def _blanked(course: Course, exercise: Exercise, timeout: float) -> Run:
    with tempfile.TemporaryDirectory(prefix="course-") as scratch:
        target = Path(scratch) / exercise.file
        target.parent.mkdir(parents=True)
        target.write_text(blanked(course, exercise.file, [exercise]), encoding="utf-8")
        return run_tests(course, exercise.tests, timeout=timeout, overlay=Path(scratch), stop_at=exercise.id)


def _verdict(exercise: Exercise, blank: Run, reference: Run) -> Verdict:
    caught = next((result.id for result in blank.results if exercise.id in result.exercises), "")
    problem = _reference_problem(exercise, reference) or ("" if caught else _missed(blank))
    return Verdict(exercise, caught, blank.seconds, problem)


def _reference_problem(exercise: Exercise, run: Run) -> str:
    failed = [result for result in run.failures if concerns(exercise, result)]
    if failed:
        return f"the reference fails {failed[0].line}"
    if run.stopped:
        return f"the reference's run stopped in {run.where}: {run.stopped}"
    if not any(result.outcome == "passed" and exercise.judged_by(result.id) for result in run.results):
        return f"no test of it ran against the reference: {run.last_line}"
    return ""


def _missed(run: Run) -> str:
    if run.stopped:
        return f"blank, the run stopped in {run.where}: {run.stopped}"
    if run.broken:
        return f"blank, {run.broken[0].id} cannot be collected: {shorten(run.broken[0].error)}"
    if run.failures:
        return f"blank, a test fails for another reason: {run.failures[0].line}"
    if not run.results:
        return f"blank, no test ran: {run.last_line}"
    return f"blank, all of its {len(run.results)} tests pass"

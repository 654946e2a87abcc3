"""The gate: every exercise is noticed when it is blank, for the right reason, and the reference passes its tests."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

from chapters.checking import concerns
from chapters.course import Course
from chapters.exercises import Exercise, blanked
from chapters.testing import Run, run_tests, shorten, stop_all

AT_ONCE = 2


@dataclass(frozen=True)
class Verdict:
    """`test` is the one that noticed the blank; `problem` says why the exercise does not pass the gate, if so."""

    exercise: Exercise
    test: str
    seconds: float
    problem: str

    @property
    def ok(self) -> bool:
        return not self.problem


def gate(course: Course, exercises: Sequence[Exercise], timeout: float) -> Iterator[Verdict]:
    """A verdict for each exercise, as they come. The tests of one phase run once against the reference (with the
    time of all its exercises), and once more for each exercise blanked alone."""
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
    noticed = next((result.id for result in blank.results if exercise.id in result.exercises), "")
    problem = _reference_problem(exercise, reference) or ("" if noticed else _unnoticed(blank))
    return Verdict(exercise, noticed, blank.seconds, problem)


def _reference_problem(exercise: Exercise, run: Run) -> str:
    failed = [result for result in run.failures if concerns(exercise, result)]
    if failed:
        return f"the reference fails {failed[0].line}"
    if run.stopped:
        return f"the reference's run stopped in {run.where}: {run.stopped}"
    if not any(result.outcome == "passed" and exercise.judged_by(result.id) for result in run.results):
        return f"no test of it ran against the reference: {run.last_line}"
    return ""


def _unnoticed(run: Run) -> str:
    if run.stopped:
        return f"blank, the run stopped in {run.where}: {run.stopped}"
    if run.broken:
        return f"blank, {run.broken[0].id} cannot be collected: {shorten(run.broken[0].error)}"
    if run.failures:
        return f"blank, a test fails for another reason: {run.failures[0].line}"
    if not run.results:
        return f"blank, no test ran: {run.last_line}"
    return f"blank, all of its {len(run.results)} tests pass"

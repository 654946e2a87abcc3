"""Running tests with an overlay in a process of their own, and judging a workspace by them."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chapters.course import Course, Phase
from chapters.exercises import Exercise
from chapters.workspace import Attempt, State, assemble

_running: set[subprocess.Popen[bytes]] = set()


@dataclass(frozen=True)
class Result:
    """A test that ran, or a file that could not be collected. `error` is the first line of what was raised, or the
    reason of a skip; `exercises` are those that the failure names."""

    id: str
    outcome: str
    seconds: float = 0.0
    error: str = ""
    exercises: tuple[str, ...] = ()


@dataclass(frozen=True)
class Run:
    """One run of pytest: the tests that ran to their end, and the files that could not be collected. `stopped` says
    why the run itself did not reach its end, if so, and `current` which test it was in."""

    results: tuple[Result, ...]
    broken: tuple[Result, ...]
    collected: tuple[str, ...]
    stopped: str
    current: str
    seconds: float
    output: str

    @property
    def last_line(self) -> str:
        return _last_line(self.output)

    @property
    def where(self) -> str:
        return self.current or "the imports of the tests"

    @property
    def failures(self) -> tuple[Result, ...]:
        return (*self.broken, *(result for result in self.results if result.outcome == "failed"))


def run_tests(
    course: Course,
    tests: Iterable[str],
    *,
    timeout: float,
    overlay: Path | None = None,
    stop_at: str | None = None,
    options: Sequence[str] = (),
) -> Run:
    """Run `tests` from the root, without those marked slow unless `options` choose by another mark. Past `timeout`
    seconds the whole process group is killed and the run says so."""
    with tempfile.TemporaryDirectory(prefix="course-") as scratch:
        report, output = Path(scratch) / "report.jsonl", Path(scratch) / "output.txt"
        report.touch()
        command = [sys.executable, "-m", "pytest", "-p", "chapters.overlay", "-p", "no:cacheprovider", "-q"]
        command += ["-m", "not slow"]
        command += ["--color=no", "--tb=short", "--maxfail=0", "--continue-on-collection-errors"]
        command += [f"--rootdir={course.root}", *options, *tests]
        began = time.monotonic()
        with output.open("wb") as sink:
            process = subprocess.Popen(
                command,
                cwd=course.root,
                env=_environment(course, report, overlay, stop_at),
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            _running.add(process)
            try:
                process.wait(timeout)
                timed_out = False
            except subprocess.TimeoutExpired:
                timed_out = True
            finally:
                _kill(process)
        seconds = time.monotonic() - began
        whole, _, _ = report.read_text(encoding="utf-8").rpartition("\n")  # a killed run may leave half a line
        events = [json.loads(line) for line in whole.split("\n") if line]
        said = output.read_text(encoding="utf-8", errors="replace")
        late = f"not done after {timeout:g} s" if timed_out else ""
        return _run(events, late, seconds, said)


def stop_all() -> None:
    """Kill what still runs: a Ctrl-C reaches us but not the process groups we started."""
    for process in list(_running):
        _kill(process)


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End the group, the test's own children included; a group that is gone already is what we want."""
    if hasattr(os, "killpg"):
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
    else:
        process.kill()
    process.wait()
    _running.discard(process)


def _environment(course: Course, report: Path, overlay: Path | None, stop_at: str | None) -> dict[str, str]:
    """The caller's environment without what would steer pytest from outside."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "NANO_COURSE_"))}
    home = str(Path(__file__).resolve().parent.parent)
    kept["PYTHONPATH"] = os.pathsep.join(filter(None, [str(course.root), home, kept.get("PYTHONPATH")]))
    kept["NANO_COURSE_ROOT"] = str(course.root)
    kept["NANO_COURSE_REPORT"] = str(report)
    optional = {"NANO_COURSE_OVERLAY": overlay and str(overlay), "NANO_COURSE_STOP": stop_at}
    return kept | {name: value for name, value in optional.items() if value}


def _last_line(output: str) -> str:
    return (output.strip().splitlines() or ["pytest said nothing"])[-1]


def _run(events: list[dict[str, Any]], late: str, seconds: float, output: str) -> Run:
    """Put the events of one run together. Setup, call and teardown of a test become one result, the worst of them; a
    test without its teardown has no result, since the process ended in it."""
    worst = {"passed": 0, "skipped": 1, "failed": 2}
    results: dict[str, Result] = {}
    broken: list[Result] = []
    collected: tuple[str, ...] = ()
    current = ""
    stopped = late or f"pytest ended early: {_last_line(output)}"
    for event in events:
        if event["event"] == "finished":
            stopped = late or ("interrupted" if current else "")
        elif event["event"] == "collected":
            collected = tuple(event["ids"])
        elif event["event"] == "start":
            current = event["id"]
        elif event["event"] == "broken":
            broken.append(Result(event["id"], "failed", error=event["error"]))
        else:
            old = results.get(event["id"], Result(event["id"], "passed"))
            spent = old.seconds + event["seconds"]
            if worst[event["outcome"]] > worst[old.outcome]:
                old = Result(event["id"], event["outcome"], spent, event["error"], tuple(event["exercises"]))
            results[event["id"]] = Result(old.id, old.outcome, spent, old.error, old.exercises)
            current = "" if event["when"] == "teardown" else current
    results.pop(current, None)
    return Run(tuple(results.values()), tuple(broken), collected, stopped, current, seconds, output)


@dataclass(frozen=True)
class Judged:
    """An exercise and what became of it: passed, failed, skipped, not reached, or the stage it stopped at."""

    exercise: Exercise
    status: str
    note: str = ""


@dataclass(frozen=True)
class Report:
    """What `check` found in one phase. `others` are failing tests that judge none of the exercises attempted."""

    phase: Phase
    rows: tuple[Judged, ...]
    others: tuple[Result, ...]
    run: Run | None
    log: Path

    @property
    def ok(self) -> bool:
        fine = all(row.status in ("passed", "skipped", "not started") for row in self.rows)
        return fine and not self.others and not (self.run and self.run.stopped)


def check(course: Course, phase: Phase, timeout: float) -> Report:
    """Run the phase's tests against the workspace, everything else being the reference, and remember the results."""
    folder = course.private / "check" / phase.package
    if folder.exists():
        shutil.rmtree(folder)
    attempts = assemble(course, phase, folder)
    log = folder / "pytest.txt"
    run = None
    if any(attempt.stage == "attempted" for attempt in attempts):
        named = {test.partition("::")[0] for attempt in attempts for test in attempt.exercise.tests}
        outside = sorted(file for file in named if not file.startswith(f"{phase.tests}/"))
        own = [phase.tests] if (course.root / phase.tests).is_dir() else []
        run = run_tests(course, [*own, *outside], timeout=timeout, overlay=folder)
        log.write_text(run.output, encoding="utf-8")
    rows = tuple(_judge(attempt, run) for attempt in attempts)
    state = State(course)
    for row in rows:
        known = state.of(row.exercise.id)
        state.update(row.exercise.id, result=row.status, passed=known.passed or row.status == "passed")
    attempted = [attempt.exercise for attempt in attempts if attempt.stage == "attempted"]
    others = [each for each in (run.failures if run else ()) if not any(concerns(one, each) for one in attempted)]
    return Report(phase, rows, tuple(others), run, log)


def concerns(exercise: Exercise, result: Result) -> bool:
    """Whether this result bears on the exercise: one of its tests, or a file of them that could not be collected."""
    return exercise.judged_by(result.id) or any(test.startswith(f"{result.id}::") for test in exercise.tests)


def _judge(attempt: Attempt, run: Run | None) -> Judged:
    exercise = attempt.exercise
    if attempt.stage != "attempted" or run is None:
        return Judged(exercise, attempt.stage, attempt.note)
    mine = [result for result in run.results if exercise.judged_by(result.id)]
    failed = [result for result in run.failures if concerns(exercise, result)]
    if failed:
        more = f" (and {len(failed) - 1} more)" if len(failed) > 1 else ""
        return Judged(exercise, "failed", f"{failed[0].id}{more}: {failed[0].error}")
    if run.stopped and (not run.current or exercise.judged_by(run.current)):
        return Judged(exercise, "failed", f"{run.where}: {run.stopped}")
    if run.stopped and set(filter(exercise.judged_by, run.collected)) - {result.id for result in mine}:
        return Judged(exercise, "not reached", f"the run ended before, in {run.current}")
    if not mine:
        return Judged(exercise, "failed", f"no test of it ran: {run.last_line}")
    if all(result.outcome == "skipped" for result in mine):
        return Judged(exercise, "skipped", mine[0].error)
    return Judged(exercise, "passed", f"{sum(result.outcome == 'passed' for result in mine)} tests")

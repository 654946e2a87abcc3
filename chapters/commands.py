"""What each command of `python -m chapters` does, and how it shows what it found. Each returns its exit code."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from contextlib import suppress

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

from chapters import checking, workspace
from chapters import exercises as exercise_files
from chapters import gate as gates
from chapters import notebooks as notebook_files
from chapters import weave as weaving
from chapters.course import Course, CourseError

_STYLES = {
    "passed": "green",
    "failed": "bold red",
    "region missing": "red",
    "syntax error": "red",
    "not reached": "red",
}


def _table(*columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _styled(text: str) -> Text:
    return Text(text, style=_STYLES.get(text, "dim"))


def _progress(out: Console) -> Progress:
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn())
    return Progress(*columns, console=out, transient=True, disable=not out.is_terminal)


def start(course: Course, args: argparse.Namespace, out: Console) -> int:
    phase = course.phase(args.phase)
    files, backup = workspace.start(course, phase, args.fresh)
    if backup:
        out.print(f"Your old files are in {course.name(backup)}/.")
    its = exercise_files.load(course, phase)
    for path in files:
        held = ", ".join(each.id for each in its if path == course.workspace / each.file)
        out.print(f"{course.name(path)}: exercise {held}", soft_wrap=True)
    out.print(f"\nOpen a file, find `# region exercise {its[0].id}`, and write what its question asks for. Then:")
    out.print(f"  python -m chapters check {phase.number}      judge what is written (watch {phase.number} repeats it)")
    out.print(f"  python -m chapters hint {its[0].id}     when you are stuck")
    return 0


def check(course: Course, args: argparse.Namespace, out: Console) -> int:
    ok = True
    for number in _laid(course, args.phase):
        report = checking.check(course, course.phase(number), args.timeout)
        _show_report(course, report, out)
        ok = ok and report.ok
    return 0 if ok else 1


def _laid(course: Course, number: int | None) -> list[int]:
    """The phases to check: the one asked for, or all of the workspace."""
    laid = [phase.number for phase in workspace.laid_phases(course)]
    wanted = [course.phase(number).number] if number is not None else laid
    if not wanted or wanted[0] not in laid:
        what = "there is no workspace yet" if number is None else f"phase {number} is not in the workspace"
        raise CourseError(f"{what}: `python -m chapters start {'N' if number is None else number}` lays it")
    return wanted


def _show_report(course: Course, report: checking.Report, out: Console) -> None:
    out.print(Text(f"Phase {report.phase.number}, {report.phase.package}", style="bold"))
    table = _table("exercise", "title", "result", "")
    for row in report.rows:
        table.add_row(row.exercise.id, row.exercise.title, _styled(row.status), row.note)
    for result in report.others:
        table.add_row("", "(another test)", _styled("failed"), f"{result.id}: {result.error}")
    out.print(table)
    if report.run is None:
        out.print("No exercise is written yet, so no test was run.")
        return
    if report.run.stopped:
        out.print(f"Stopped in {report.run.where}: {report.run.stopped}.", soft_wrap=True)
        out.print("An endless loop looks like this; --timeout sets the limit.")
    out.print(f"Everything pytest said is in {course.name(report.log)}.", soft_wrap=True)


def watch(course: Course, args: argparse.Namespace, out: Console) -> int:
    while True:
        seen = _snapshot(course)
        check(course, args, out)
        out.print("Watching the workspace; Ctrl-C ends.")
        while _snapshot(course) == seen:
            time.sleep(0.5)


def _snapshot(course: Course) -> dict[str, tuple[int, int]]:
    seen = {}
    for path in course.workspace.rglob("*.py"):
        with suppress(FileNotFoundError):  # an editor may swap files while we look
            stat = path.stat()
            seen[str(path)] = (stat.st_mtime_ns, stat.st_size)
    return seen


def hint(course: Course, args: argparse.Namespace, out: Console) -> int:
    exercise = exercise_files.find(course, args.exercise)
    state = workspace.State(course)
    total = len(exercise.hints)
    seen = state.of(exercise.id).hints
    if seen < total:
        state.update(exercise.id, hints=seen + 1)
        left = total - seen - 1
        out.print(f"Hint {seen + 1} of {total}: {exercise.hints[seen]}")
        out.print(f"{left} more." if left else f"That was the last one; `solution {exercise.id}` shows the answer.")
        return 0
    for number, hint in enumerate(exercise.hints, 1):
        out.print(f"Hint {number} of {total}: {hint}")
    out.print(f"0 more; `solution {exercise.id}` shows the answer.")
    return 0


def solution(course: Course, args: argparse.Namespace, out: Console) -> int:
    lines = workspace.solution(course, exercise_files.find(course, args.exercise))
    styles = {"+": "green", "-": "red", "@": "cyan"}
    for line in lines:
        out.print(Text(line, style=styles.get(line[:1], "")), soft_wrap=True)
    if not lines:
        out.print("What you wrote is the reference, to the letter.")
    return 0


def status(course: Course, args: argparse.Namespace, out: Console) -> int:
    state = workspace.State(course)
    table = _table("phase", "package", "exercises", "passed", "last results", "hints used", "workspace")
    for phase in course.phases():
        its = exercise_files.load(course, phase)
        known = [state.of(each.id) for each in its]
        passed = f"{sum(progress.passed for progress in known)}/{len(its)}"
        last = ", ".join(
            f"{each.id} {progress.result}" for each, progress in zip(its, known, strict=True) if progress.result
        )
        laid = "yes" if phase in workspace.laid_phases(course) else ""
        hints = str(sum(progress.hints for progress in known))
        table.add_row(str(phase.number), phase.package, str(len(its)), passed, last, hints, laid)
    out.print(table)
    return 0


def exercises(course: Course, args: argparse.Namespace, out: Console) -> int:
    load = exercise_files.need if args.phases else exercise_files.load
    its = [each for phase in course.pick(args.phases) for each in load(course, phase)]
    if args.gate:
        return _gate(course, its, 120 if args.timeout is None else args.timeout, out)
    if args.timeout is not None:
        raise CourseError("--timeout is for --gate; a list runs nothing")
    table = _table("exercise", "title", "file", "hints", "tests")
    for each in its:
        table.add_row(each.id, each.title, each.file, str(len(each.hints)), "\n".join(each.tests))
    out.print(table)
    return 0


def _gate(course: Course, its: Sequence[exercise_files.Exercise], timeout: float, out: Console) -> int:
    if not its:
        raise CourseError("no phase has exercises")
    verdicts = []
    with _progress(out) as progress:
        task = progress.add_task("gate", total=len(its))
        for verdict in gates.gate(course, its, timeout):
            verdicts.append(verdict)
            progress.advance(task)
    table = _table("exercise", "gate", "noticed by", "seconds", "problem")
    for verdict in sorted(verdicts, key=lambda verdict: its.index(verdict.exercise)):
        shown = _styled("passed" if verdict.ok else "failed")
        table.add_row(verdict.exercise.id, shown, verdict.test, f"{verdict.seconds:.1f}", verdict.problem)
    out.print(table)
    return 0 if all(verdict.ok for verdict in verdicts) else 1


def weave(course: Course, args: argparse.Namespace, out: Console) -> int:
    woven = weaving.weave_all(course)
    problems = [problem for document in woven for problem in document.problems]
    drifted = [document for document in woven if document.drifted]
    for document in drifted:
        if args.check:
            out.print(document.diff(), soft_wrap=True)
        else:
            (course.root / document.name).write_bytes(document.after.encode())
            out.print(f"{document.name}: woven")
    for problem in problems:
        out.print(problem, soft_wrap=True)
    if drifted and args.check:
        out.print(f"{len(drifted)} drifted; `python -m chapters weave` writes them anew.")
    elif not drifted and not problems:
        out.print("Every listing and figure is what its source says.")
    return 1 if problems or (args.check and drifted) else 0


def notebooks(course: Course, args: argparse.Namespace, out: Console) -> int:
    known = {path.name: path for path in course.notebooks()}
    unknown = [name for name in args.names if name not in known and f"{name}.ipynb" not in known]
    if unknown:
        raise CourseError(f"there is no notebook {', '.join(unknown)}; the notebooks are: {', '.join(known) or 'none'}")
    wanted = [
        path for name, path in known.items() if not args.names or {name, name.removesuffix(".ipynb")} & {*args.names}
    ]
    if not args.execute:
        table = _table("notebook", "cells", "with code", "executed")
        for path in wanted:
            table.add_row(path.name, *map(str, notebook_files.summary(path)))
        out.print(table)
        return 0
    failed = False
    for path in wanted:
        try:
            with _progress(out) as progress:
                task = progress.add_task(path.name, total=notebook_files.summary(path)[0])
                done = notebook_files.execute(
                    path,
                    course.root,
                    on_cell=lambda index: progress.update(task, completed=index),  # noqa: B023
                )
            notebook_files.write(done, path)
            out.print(f"{path.name}: executed")
        except notebook_files.NotebookError as error:
            failed = True
            out.print(f"{error}\n{path.name} is left as it was.", soft_wrap=True)
    return 1 if failed else 0


def doctor(course: Course, args: argparse.Namespace, out: Console) -> int:
    from chapters import doctor
    from phase0_request import machine

    here = machine.describe()
    tier = doctor.tier(here)
    table = _table("this machine", "")
    for row in [*doctor.describe(here), ("tier", f"{tier.name}: {tier.meaning}")]:
        table.add_row(*row)
    out.print(table)
    for line in tier.skipped:
        out.print(f"skipped here: {line}")
    course.need_checkout("doctor's proof")
    run = checking.run_tests(course, ["tests"], timeout=args.timeout, options=["-m", "proof"])
    passed = sum(result.outcome == "passed" for result in run.results)
    for result in run.results:
        if result.outcome == "skipped":
            out.print(f"skipped here: {result.id}: {result.error}", soft_wrap=True)
    for result in run.failures:
        out.print(Text(f"failed: {result.id}: {result.error}", style="red"), soft_wrap=True)
    if run.stopped:
        out.print(f"Stopped in {run.where}: {run.stopped}; --timeout sets the limit.", soft_wrap=True)
    proved = passed > 0 and not run.failures and not run.stopped
    count = f"{passed} tests marked `proof` passed in {run.seconds:.1f} s"
    out.print(f"\nThe reference works here: {count}." if proved else f"\nNo proof: {count}. {run.last_line}")
    return 0 if proved else 1

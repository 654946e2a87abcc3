"""The commands of `python -m chapters`: each prints its results and returns its exit code."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

from chapters import bugs, checking, testing, workspace
from chapters import exercises as exercise_files
from chapters import notebooks as notebook_files
from chapters import weave as weaving
from chapters.course import Course, CourseError
from chapters.exercises import Exercise


def _table(*columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def start(course: Course, args: argparse.Namespace, out: Console) -> int:
    phase = course.phase(args.phase)
    files, backup = workspace.start(course, phase, args.fresh)
    if backup:
        out.print(f"Your old files are in {course.name(backup)}/.")
    its = exercise_files.load(course, phase)
    for path in files:
        ids = ", ".join(each.id for each in its if path == course.workspace / each.file)
        out.print(f"{course.name(path)}: exercise {ids}", soft_wrap=True)
    out.print(f"\nOpen a file, find `# region exercise {its[0].id}`, and answer its question there. Then:")
    out.print(f"  python -m chapters check {its[0].id}    judge the answer (watch {phase.number}: after each save)")
    out.print(f"  python -m chapters hint {its[0].id}     when you are stuck")
    return 0


def hint(course: Course, args: argparse.Namespace, out: Console) -> int:
    exercise = exercise_files.find(course, args.exercise)
    state = workspace.State(course)
    total = len(exercise.hints)
    seen = min(state.of(exercise.id).hints + 1, total)
    state.update(exercise.id, hints=seen)
    for number, text in enumerate(exercise.hints[:seen], 1):
        out.print(f"Hint {number} of {total}: {text}")
    answer = "" if seen < total else f" `solution {exercise.id}` shows the answer."
    out.print(f"{total - seen} more.{answer}")
    return 0


def solution(course: Course, args: argparse.Namespace, out: Console) -> int:
    lines = workspace.solution(course, exercise_files.find(course, args.exercise))
    styles = {"+": "green", "-": "red", "@": "cyan"}
    for line in lines or ["Your region equals the reference."]:
        out.print(Text(line, style=styles.get(line[:1], "")), soft_wrap=True)
    return 0


def status(course: Course, args: argparse.Namespace, out: Console) -> int:
    state = workspace.State(course)
    columns = ("phase", "package", "exercises", "passed", "last not passed", "bugs mended", "hints used", "workspace")
    table = _table(*columns)
    for phase in course.phases():
        its, planted = exercise_files.load(course, phase), bugs.load(course, phase)
        known = {each.id: state.of(each.id) for each in its}
        passed = f"{sum(progress.passed for progress in known.values())}/{len(its)}"
        last = ", ".join(
            f"{each.id} {known[each.id].result}{_changed(course, each, known[each.id])}"
            for each in its
            if known[each.id].result not in (None, "passed")
        )
        mended = f"{sum(state.of(bug.key).passed for bug in planted)}/{len(planted)}"
        hints = str(sum(progress.hints for progress in known.values()))
        started = "yes" if phase in workspace.started_phases(course) else ""
        table.add_row(str(phase.number), phase.package, str(len(its)), passed, last, mended, hints, started)
    out.print(table)
    return 0


def _changed(course: Course, exercise: Exercise, progress: workspace.Progress) -> str:
    """Whether the result is of an older answer."""
    same = progress.answer in (None, workspace.fingerprint(course, exercise))
    return "" if same else " before your last edit"


def exercises(course: Course, args: argparse.Namespace, out: Console) -> int:
    load = exercise_files.need if args.phases else exercise_files.load
    its = [each for phase in course.pick(args.phases) for each in load(course, phase)]
    if args.gate:
        return _gate(course, its, args.timeout or 120, out)
    if args.timeout:
        raise CourseError("--timeout needs --gate: a list runs no tests")
    table = _table("exercise", "title", "lines", "file", "hints", "tests named")
    lines = {each: exercise_files.answer_lines(course.root, each) for each in its}
    for each in its:
        title = f"{each.title} (large)" if each.large else each.title
        table.add_row(each.id, title, str(lines[each]), each.file, str(len(each.hints)), str(len(each.tests)))
    out.print(table)
    out.print(f"{len(its)} exercises; the reference's answers have {sum(lines.values())} lines of code.")
    return 0


def _gate(course: Course, its: Sequence[Exercise], timeout: float, out: Console) -> int:
    if not its:
        raise CourseError("no phase has exercises")
    ok = True
    for verdict in checking.gate(course, its, timeout):
        ok &= verdict.ok
        result = f"passed: caught by {verdict.test}" if verdict.ok else f"failed: {verdict.problem}"
        out.print(f"{verdict.exercise.id} {result} ({verdict.seconds:.1f} s)", soft_wrap=True)
    return 0 if ok else 1


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
        out.print(f"{len(drifted)} differ from their source; `python -m chapters weave` rewrites them.")
    elif not drifted and not problems:
        out.print("Every listing and figure equals its source.")
    return 1 if problems or (args.check and drifted) else 0


def notebooks(course: Course, args: argparse.Namespace, out: Console) -> int:
    known = {path.stem: path for path in course.notebooks()}
    names = [name.removesuffix(".ipynb") for name in args.names] or list(known)
    unknown = [name for name in names if name not in known]
    if unknown:
        raise CourseError(f"there is no notebook {', '.join(unknown)}; the notebooks are: {', '.join(known) or 'none'}")
    failed = False
    for path in (known[name] for name in names):
        if not args.execute:
            code, executed = notebook_files.summary(path)
            out.print(f"{path.name}: {executed} of {code} code cells executed")
            continue
        try:
            notebook_files.write(notebook_files.execute(path, course.root), path)
            out.print(f"{path.name}: executed")
        except notebook_files.NotebookError as error:
            failed = True
            out.print(f"{error}\n{path.name} was not changed.", soft_wrap=True)
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
    with Progress(console=out, transient=True) as bar:
        proof, files = bar.add_task("running the proof", total=None), doctor.files(course) or ["tests"]

        def show(ended: int, tests: int) -> None:
            bar.update(proof, completed=ended, total=tests)

        run = testing.run_tests(course, files, timeout=args.timeout, options=["-m", "proof"], progress=show)
    reasons = Counter(result.line.partition(": ")[2] for result in run.results if result.outcome == "skipped")
    for reason, number in reasons.items():
        out.print(f"skipped here: {number} of the proofs: {reason.removeprefix('Skipped: ')}", soft_wrap=True)
    for result in run.failures:
        out.print(Text(f"failed: {result.line}", style="red"), soft_wrap=True)
    if run.stopped:
        out.print(f"{run.where}: {run.stopped}.", soft_wrap=True)
    passed = sum(result.outcome == "passed" for result in run.results)
    proved = passed > 0 and not run.failures and not run.stopped
    count = f"{passed} tests marked `proof` passed in {run.seconds:.1f} s"
    out.print(f"\nThe reference works here: {count}." if proved else f"\nNo proof: {count}. {run.last_line}")
    return 0 if proved else 1

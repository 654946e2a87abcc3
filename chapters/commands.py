"""The commands of `python -m chapters`: each prints its results and returns its exit code."""

from __future__ import annotations

import argparse
import itertools
import os
import re
import shutil
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from chapters import checking, overlay, testing, workspace
from chapters import exercises as exercise_files
from chapters import notebooks as notebook_files
from chapters import weave as weaving
from chapters.course import Course, CourseError, Phase
from chapters.exercises import Exercise

_STYLES = {"passed": "green", "failed": "bold red", "region missing": "red", "syntax error": "red"}


def _table(*columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _results(rows: Iterable[tuple[str, str, str, str]]) -> Table:
    table = _table("exercise", "title", "result", "")
    for id, title, result, note in rows:
        table.add_row(id, title, Text(result, style=_STYLES.get(result, "dim")), note)
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
    out.print(
        f"  python -m chapters check {phase.number}      judge your answers (watch {phase.number}: after each save)"
    )
    out.print(f"  python -m chapters hint {its[0].id}     when you are stuck")
    return 0


def check(course: Course, args: argparse.Namespace, out: Console) -> int:
    its = _chosen(course, args.target)
    with testing.Runners(course, min(len(its), testing.AT_ONCE)) as runners:
        return _check(course, its, runners, args.timeout, out)


def _chosen(course: Course, target: str | None) -> list[Exercise]:
    """The exercises of the workspace that `N`, `N.M` or nothing names."""
    if target and not re.fullmatch(r"\d+(\.\d+)?", target):
        raise CourseError(f"a phase is a number, an exercise N.M, not '{target}'")
    if target and "." in target:
        exercise = exercise_files.find(course, target)
        _started(course, exercise.phase)
        return [exercise]
    return [
        each
        for phase in _started(course, int(target) if target else None)
        for each in exercise_files.load(course, phase)
    ]


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
        ok &= all(one.ok for one in judged)
        failed = next((one for one in judged if one.failure), None)
        if failed:
            _explain(course, failed, out)
        passed = [one.exercise for one in judged if one.status == "passed"]
        if len(passed) > 1 and not failed:
            problem = checking.together(course, passed, runners, timeout)
            ok &= not problem
            result = f"failed: {problem}" if problem else "passed"
            out.print(f"{', '.join(exercise.id for exercise in passed)} together: {result}", soft_wrap=True)
    return 0 if ok else 1


def _row(one: checking.Judged) -> Text:
    return Text.assemble(
        f"{one.exercise.id:<5}{one.exercise.title:<34} ",
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
    rows += [("your code", place) for place in one.places[-3:] or [workspace.place(course, one.exercise)]]
    rows += [("at the end", picture) for picture in details.get("pictures", ())]
    for name, text in rows:
        lines = [line if len(line) <= 110 else f"{line[:107]}..." for line in text.split("\n") if line.strip()]
        lines = [line for line in lines if "Use -v to get" not in line]
        lines = lines if len(lines) <= 14 else [*lines[:13], "..."]
        out.print(f"  {name:<11}" + f"\n{'':13}".join(lines), soft_wrap=True)
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
    stages = [workspace.attempt(course, each) for phase in phases for each in exercise_files.load(course, phase)]
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
        lines = sum(exercise_files.answer_lines(course.workspace, each) for each in written)
        names = ", ".join(each.id for each in written) or "nothing yet"
        out.print(f"Yours: {names} ({lines} lines of code). The rest is the reference.", soft_wrap=True)
    sys.stdout.flush()
    environment = overlay.environment(course.root, os.environ, folder)
    return os.execve(sys.executable, [sys.executable, "-m", *command], environment)


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
    table = _table("phase", "package", "exercises", "passed", "last results", "hints used", "workspace")
    for phase in course.phases():
        its = exercise_files.load(course, phase)
        known = {each.id: state.of(each.id) for each in its}
        passed = f"{sum(progress.passed for progress in known.values())}/{len(its)}"
        last = ", ".join(f"{id} {progress.result}" for id, progress in known.items() if progress.result)
        hints = str(sum(progress.hints for progress in known.values()))
        started = "yes" if phase in workspace.started_phases(course) else ""
        table.add_row(str(phase.number), phase.package, str(len(its)), passed, last, hints, started)
    out.print(table)
    return 0


def exercises(course: Course, args: argparse.Namespace, out: Console) -> int:
    load = exercise_files.need if args.phases else exercise_files.load
    its = [each for phase in course.pick(args.phases) for each in load(course, phase)]
    if args.gate:
        return _gate(course, its, args.timeout or 120, out)
    if args.timeout:
        raise CourseError("--timeout needs --gate: a list runs no tests")
    table = _table("exercise", "title", "lines", "file", "hints", "tests")
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
    with out.status("running the proof"):
        files = doctor.files(course) or ["tests"]
        run = testing.run_tests(course, files, timeout=args.timeout, options=["-m", "proof"])
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

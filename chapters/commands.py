"""The commands with which a reader writes, judges and runs exercises. Each prints its results and returns its exit
code."""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from chapters import bugs, checking, workspace
from chapters import exercises as exercise_files
from chapters.course import COMPILED, Course, CourseError
from chapters.exercises import Exercise, answer_lines
from chapters.plan import PAGES, hours
from chapters.testing import copy_checkout
from chapters.workspace import State

_STYLES = {"passed": "green", "failed": "bold red", "region missing": "red", "syntax error": "red"}
_LINES = 40  # of a failure, so that it fits on a screen
_BAR = 8  # columns


def make_table(*columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def start(course: Course, args: argparse.Namespace, out: Console) -> int:
    chapter = args.chapter
    files, backup = workspace.start(course, chapter, args.fresh, args.all)
    if backup:
        out.print(f"Your old files are in {course.name(backup)}/.")
    its = _started(course, chapter)
    for path in files:
        ids = ", ".join(each.id for each in its if path == course.workspace / each.file)
        out.print(f"{course.name(path)}: exercise {ids}", soft_wrap=True)
    if further := len(exercise_files.load(course, chapter)) - len(its):
        out.print(f"{further} more are beyond the core: `python -m chapters start {chapter} --all` adds them.")
        out.print("Their answers are given: one that is in these files has `# given: exercise N.M` above it.")
    out.print(f"\nOpen a file, find `# region exercise {its[0].id}`, and answer its question there. Then:")
    out.print(f"  python -m chapters check {its[0].id}    judge the answer (watch {chapter}: after each save)")
    out.print(f"  python -m chapters hint {its[0].id}     when you are stuck")
    return 0


def check(course: Course, args: argparse.Namespace, out: Console) -> int:
    its = _chosen(course, args.targets)
    groups = itertools.groupby(its, key=lambda exercise: exercise.chapter)
    fine = [_check(course, list(group), args.timeout, out) for _, group in groups]
    return 0 if all(fine) else 1


def watch(course: Course, args: argparse.Namespace, out: Console) -> int:
    """Check, and after each save judge again the exercises that it changed."""
    its = _chosen(course, args.targets)
    judged: dict[Exercise, str] = {}
    while True:
        saved = _saved(course)
        answers = {exercise: workspace.fingerprint(course, exercise) for exercise in its}
        if changed := [exercise for exercise in its if answers[exercise] != judged.get(exercise)]:
            for _, group in itertools.groupby(changed, key=lambda exercise: exercise.chapter):
                _check(course, list(group), args.timeout, out)
            out.print("Watching the workspace; Ctrl-C ends.")
        judged = answers
        while _saved(course) == saved:
            time.sleep(0.1)


def _saved(course: Course) -> list[tuple[str, int]]:
    """The files of the workspace, each with the time at which it was saved."""
    with suppress(FileNotFoundError):  # an editor may replace a file meanwhile
        return [(str(path), path.stat().st_mtime_ns) for path in course.workspace.rglob("*.py")]
    return []


def _chosen(course: Course, targets: Sequence[str]) -> list[Exercise]:
    """The exercises of the workspace that each `N` or `N.M` names; without any, all of them."""
    if not targets:
        return _started(course, None)
    chosen = dict.fromkeys(each for target in targets for each in _named(course, target))
    return sorted(chosen, key=lambda each: each.chapter)


def _named(course: Course, target: str) -> list[Exercise]:
    if not re.fullmatch(r"\d+(\.\d+)?", target):
        raise CourseError(f"a chapter is a number, an exercise N.M, not '{target}'")
    if "." in target:
        exercise = exercise_files.find(course, target)
        if exercise not in _started(course, exercise.chapter):
            ask = f"`python -m chapters start {exercise.chapter} --all` puts it there"
            raise CourseError(f"exercise {target} is not in the workspace: {ask}")
        return [exercise]
    return _started(course, int(target))


def _started(course: Course, chapter: int | None) -> list[Exercise]:
    """The exercises in the workspace, of the given chapter or all."""
    its = workspace.begun(course)
    if chapter is None:
        if not its:
            raise CourseError("there is no workspace yet: `python -m chapters start N` creates it")
        return list(its)
    exercise_files.need(course, chapter)
    its = tuple(each for each in its if each.chapter == chapter)
    if not its:
        raise CourseError(f"chapter {chapter} is not in the workspace: `python -m chapters start {chapter}` creates it")
    return list(its)


def _check(course: Course, its: Sequence[Exercise], timeout: float, out: Console) -> bool:
    """Judge each exercise of a chapter alone, show the first failure, and run together what passes alone."""
    results = []
    for judged in checking.judge_all(course, its, timeout):
        out.print(_row(judged.exercise, judged.status, judged.note), soft_wrap=True)
        results.append(judged)
    fine = all(judged.ok for judged in results)
    failed = [judged for judged in results if judged.failure]
    for judged in failed[:1]:
        _explain(course, judged, out)
    for judged in failed[1:]:
        out.print(f"{judged.exercise.id} failed, too: python -m chapters check {judged.exercise.id}", soft_wrap=True)
    passed = [judged.exercise for judged in results if judged.status == "passed"]
    if len(passed) > 1 and fine:
        problem = checking.together(course, passed, timeout)
        result = f"failed: {problem}" if problem else "passed"
        out.print(f"{', '.join(exercise.id for exercise in passed)} together: {result}", soft_wrap=True)
        fine = not problem
    return fine


def _row(exercise: Exercise, status: str, note: str) -> Text:
    return Text.assemble(f"{exercise.id:<5}{exercise.title:<39} ", (f"{status:<15}", _STYLES.get(status, "dim")), note)


def _explain(course: Course, judged: checking.Judged, out: Console) -> None:
    """A failure in one screen: what pytest says of it, with the lines of the workspace."""
    assert judged.failure
    exercise = judged.exercise
    out.print(Text(f"\n{exercise.id}: {judged.failure.id}", style="bold"), soft_wrap=True)
    lines = [line for line in judged.failure.text.split("\n") if line.strip()]
    for line in lines if len(lines) <= _LINES else ["...", *lines[-_LINES:]]:
        out.print(f"  {line}", soft_wrap=True)
    out.print(f"Your code begins at {workspace.place(course, exercise)}. All that pytest says is in ", end="")
    out.print(f"{course.name(checking.log(course, exercise.id))}. A hint: python -m chapters hint {exercise.id}\n")


def show_hints(course: Course, key: str, hints: Sequence[str], answer: str, out: Console) -> int:
    """The hints seen so far and one more; after the last, the command that shows the answer."""
    state = State(course)
    seen = min(state.of(key).hints + 1, len(hints))
    state.update(key, hints=seen)
    for number, text in enumerate(hints[:seen], 1):
        out.print(f"Hint {number} of {len(hints)}: {text}")
    out.print(f"{len(hints) - seen} more." + (f" `{answer}` shows the answer." if seen == len(hints) else ""))
    return 0


def hint(course: Course, args: argparse.Namespace, out: Console) -> int:
    exercise = exercise_files.find(course, args.exercise)
    return show_hints(course, exercise.id, exercise.hints, f"solution {exercise.id}", out)


def solution(course: Course, args: argparse.Namespace, out: Console) -> int:
    diff = workspace.solution(course, exercise_files.find(course, args.exercise))
    print_diff(diff or ["Your region equals the reference."], out)
    return 0


def print_diff(lines: Sequence[str], out: Console) -> None:
    styles = {"+": "green", "-": "red", "@": "cyan"}
    for line in lines:
        out.print(Text(line, style=styles.get(line[:1], "")), soft_wrap=True)


def status(course: Course, args: argparse.Namespace, out: Console) -> int:
    state, table = State(course), make_table("chapter", "exercises", "bugs", "notes")
    started = {each.chapter for each in workspace.begun(course)}
    for chapter in sorted({*course.chapters_with("exercises"), *course.chapters_with("bugs")}):
        its, planted = exercise_files.load(course, chapter), bugs.load(course, chapter)
        known = {each: state.of(each.id) for each in its}
        core = [progress for each, progress in known.items() if each.core]
        further = [progress for each, progress in known.items() if not each.core]
        mended = [state.of(bug.key) for bug in planted]
        said = [_not_passed(course, each, progress) for each, progress in known.items()]
        hints = sum(progress.hints for progress in known.values())
        said += [f"{hints} hint{'s' * (hints > 1)}" if hints else "", "in the workspace" if chapter in started else ""]
        pages = [page for page in PAGES if page.name.startswith(f"{chapter:02d}_") and page.path.exists()]
        pages = [page for page in pages if page.evening or not core]
        read, write = sum(page.minutes for page in pages), hours(sum(page.hours for page in pages))
        table.add_row(
            Text.assemble(f"{chapter:<3}", (f"{read} min + {write} h", "dim")),
            Text("\n").join(_bar(part, name) for part, name in ((core, "core"), (further, "beyond")) if part),
            _bar(mended, ""),
            ", ".join(filter(None, said)),
        )
    out.print(table)
    if bugs.report(course):
        bug = bugs.current(course)
        out.print(f"Bug {bug.id} is planted, grade {bugs.grade(course)}; hints seen: {state.of(bug.key).hints}.")
    return 0


def _bar(known: Sequence[workspace.Progress], name: str) -> Text:
    """A bar of how many passed, and the count."""
    passed = sum(progress.passed for progress in known)
    full = round(passed / len(known) * _BAR) if known else 0
    count = f" {f'{passed}/{len(known)}':<5} {name}".rstrip() if known else ""
    return Text.assemble(("█" * full, "green"), ("░" * (_BAR - full) if known else "", "dim"), count)


def _not_passed(course: Course, exercise: Exercise, progress: workspace.Progress) -> str:
    """The last result of an exercise, and whether it is of an older answer; empty if it passed."""
    if progress.result in (None, "passed"):
        return ""
    older = progress.answer not in (None, workspace.fingerprint(course, exercise))
    return f"{exercise.id} {progress.result}{' before your last edit' if older else ''}"


# Programs


def run(course: Course, args: argparse.Namespace, out: Console) -> int:
    """Run a phase: with the bug, if one of this phase is planted, and otherwise with the workspace."""
    phase = course.phase(args.phase)
    if (bugs.folder(course) / phase.package).is_dir():
        return execute(course, "run", bugs.files(course), ["-m", phase.package, *args.arguments])
    its = [each for each in _started(course, None) if each.package == phase.package]
    if not its:
        raise CourseError(
            f"nothing of phase {phase.number} is in the workspace: `python -m chapters start N` creates it"
        )
    return _with_answers(course, its, [phase.package, *args.arguments], out)


def mine(course: Course, args: argparse.Namespace, out: Console) -> int:
    """Serve, or measure the ladder, with the answers that passed; or generate through their kernels of Triton."""
    first, *rest = args.passed_on or ("",)
    yours = _say_what_is_yours(course, _started(course, None), out, interpreted=first == "--interpret")
    files = workspace.answered(course, yours)
    if first == "--interpret":
        spans = {
            file: [(b.first, b.last, each.id) for each in yours if each.file == file for b in each.bodies(text)]
            for file, text in files.items()
        }
        return execute(course, "run", files, ["-m", "chapters.ran", json.dumps(spans), "chapters.interpreted", *rest])
    command = "bench" if first == "ladder" else "serve"
    return execute(course, "run", files, ["-m", "phase6_integration.cli", command, *args.passed_on])


def _with_answers(course: Course, its: Sequence[Exercise], command: Sequence[str], out: Console) -> int:
    stages = {each: workspace.attempt(course, each) for each in its}
    if broken := [each for each, (stage, _) in stages.items() if stage in ("syntax error", "region missing")]:
        for each in broken:
            out.print(_row(each, *stages[each]), soft_wrap=True)
        return 1
    written = [each for each, (stage, _) in stages.items() if stage == "attempted"]
    out.print(f"Yours: {', '.join(each.id for each in written) or 'nothing yet'}.", soft_wrap=True)
    return execute(course, "run", workspace.answered(course, written), ["-m", *command])


def _say_what_is_yours(course: Course, its: Sequence[Exercise], out: Console, interpreted: bool) -> list[Exercise]:
    """Print which answers a server runs here, which it cannot run here, and which have not passed as they are now: the
    reference stands in for those. Returns those that passed. An interpreted run says itself which of them ran."""

    def say(what: str, its: Sequence[Exercise], then: str) -> None:
        if its:
            out.print(f"{what}: {', '.join(each.id for each in its)}{then}", soft_wrap=True)

    state, yours, open_ = State(course), list[Exercise](), list[Exercise]()
    for each in its:
        if workspace.attempt(course, each)[0] != "not begun":
            known = state.of(each.id)
            passed = (known.result, known.answer) == ("passed", workspace.fingerprint(course, each))
            (yours if passed else open_).append(each)
    elsewhere = {
        "tests": "a server has other code for them; labs, tests and `run 2 --torch` run them",
        **({"cpu": "a CPU only"} if has_gpu() else {"gpu": "a GPU only"}),
    }
    running = [each for each in yours if each.runs not in elsewhere]
    lines = sum(answer_lines(course.workspace, each) for each in running)
    if not yours:
        out.print("Yours: nothing yet.")
    if not interpreted:
        say("Yours and running", running, f" ({lines} lines of code).")
    for runs, where in () if interpreted else elsewhere.items():
        more = "; `python -m chapters mine --interpret` runs them slowly" * (runs == "gpu")
        say("Yours, but not run here", [each for each in yours if each.runs == runs], f" ({where}{more}).")
    say("Not passed as they are now, so the reference stands in", open_, "; `python -m chapters check` judges them.")
    return yours


def has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def execute(course: Course, name: str, files: Mapping[str, str], command: Sequence[str], inside: bool = False) -> int:
    """Become `python COMMAND` in a checkout with these files in place of the reference, as do the processes that it
    starts. Its working directory stays the reader's, unless it is to be `inside` the copy."""
    copy = copy_checkout(course, course.private / name, files)
    if inside:
        os.chdir(copy)
    sys.stdout.flush()
    environment = {"NUMBA_CACHE_DIR": str(course.root / COMPILED), **os.environ}
    environment |= {"PYTHONPATH": str(copy), "PYTHONSAFEPATH": "1"}
    return os.execve(sys.executable, [sys.executable, *command], environment)

"""Bugs that shipped in real engines, each a small mutation of a module: planted for the reader, caught by the gate."""

from __future__ import annotations

import re
import shutil
import tempfile
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chapters.course import Course, CourseError, Phase, write_atomically
from chapters.testing import Run, run_tests, shorten, stop_all

AT_ONCE = 2
_TEXTS = ("id", "title", "file", "symptom", "repro", "explanation")
_LISTS = ("hints", "sources", "tests")


@dataclass(frozen=True)
class Bug:
    """One bug, as its TOML file defines it. The first of `tests` is the fastest that fails with the bug; all of them
    pass once it is mended."""

    id: str
    title: str
    file: str
    symptom: str
    repro: str
    explanation: str
    hints: tuple[str, ...]
    sources: tuple[str, ...]
    tests: tuple[str, ...]
    edits: tuple[tuple[str, str], ...]  # (before, after)

    @property
    def phase(self) -> int:
        return int(self.id[:-1])

    @property
    def key(self) -> str:
        """The name of its progress in the stored state."""
        return f"bug {self.id}"

    def planted(self, text: str) -> str:
        """The text of its file with the bug. Each edit must find its lines exactly once."""
        for before, after in self.edits:
            if text.count(before) != 1:
                found = text.count(before)
                raise CourseError(f"bug {self.id}: the text to replace is {found} times in {self.file}:\n{before}")
            text = text.replace(before, after)
        return text


def file_of(course: Course, phase: Phase) -> Path:
    return course.chapters / f"{phase.number:02d}_bugs.toml"


def load(course: Course, phase: Phase) -> tuple[Bug, ...]:
    """The bugs of a phase, in the order of their file; none if there is no file."""
    path = file_of(course, phase)
    if not path.is_file():
        return ()
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8")).get("bug", [])
    except tomllib.TOMLDecodeError as error:
        raise CourseError(f"{course.name(path)}: {error}") from None
    bugs = tuple(_parse(course, phase, table, course.name(path)) for table in tables)
    if len({bug.id for bug in bugs}) < len(bugs):
        raise CourseError(f"{course.name(path)}: an id is used twice")
    return bugs


def _parse(course: Course, phase: Phase, table: dict[str, Any], where: str) -> Bug:
    where = f"{where}: bug {table.get('id', '?')}"
    if table.keys() != {*_TEXTS, *_LISTS, "edit"}:
        wrong = ", ".join(sorted(table.keys() ^ {*_TEXTS, *_LISTS, "edit"}))
        raise CourseError(f"{where}: missing or unknown fields: {wrong}")
    if not re.fullmatch(rf"{phase.number}[a-z]", table["id"]):
        raise CourseError(f"{where}: the id of a bug of this file is {phase.number} and a letter")
    if not all(isinstance(table[name], list) and table[name] for name in (*_LISTS, "edit")):
        raise CourseError(f"{where}: {', '.join(_LISTS)} and edit need one entry or more")
    if not table["file"].startswith(f"{phase.package}/") or not (course.root / table["file"]).is_file():
        raise CourseError(f"{where}: there is no file '{table['file']}' in {phase.package}/")
    edits = tuple((edit["before"], edit["after"]) for edit in table["edit"])
    return Bug(
        **{name: table[name].strip() for name in _TEXTS}, **{name: tuple(table[name]) for name in _LISTS}, edits=edits
    )


def every(course: Course) -> tuple[Bug, ...]:
    return tuple(bug for phase in course.phases() for bug in load(course, phase))


def find(course: Course, id: str) -> Bug:
    for bug in every(course):
        if bug.id == id:
            return bug
    raise CourseError(f"there is no bug {id}; the bugs are: {', '.join(bug.id for bug in every(course)) or 'none'}")


# The workspace


def folder(course: Course) -> Path:
    """Where a bug is planted: a copy of its phase's modules, its report and its reproduction."""
    return course.workspace / "bug"


def plant(course: Course, bug: Bug) -> None:
    """Copy the modules of the bug's phase, one of them with the bug. What was planted before moves to the backups."""
    target = folder(course)
    if target.exists():
        backups = course.private / "backups" / "bugs"
        backups.mkdir(parents=True, exist_ok=True)
        shutil.move(target, backups / f"{len(list(backups.iterdir())) + 1}")
    package = course.root / bug.file.partition("/")[0]
    for path in package.rglob("*.py"):
        name = course.name(path)
        if "lab" not in path.relative_to(package).parts:
            text = path.read_text(encoding="utf-8")
            write_atomically(target / name, (bug.planted(text) if name == bug.file else text).encode())
    write_atomically(target / "repro.py", f"{bug.repro}\n".encode())
    write_atomically(target / f"{bug.id}.md", f"# Bug {bug.id}\n\n{bug.symptom}\n".encode())


def current(course: Course) -> Bug:
    """The bug that is planted now."""
    reports = sorted(folder(course).glob("*.md"))
    if not reports:
        raise CourseError("no bug is planted: `python -m chapters break N` plants one of phase N")
    return find(course, reports[0].stem)


# The gate


@dataclass(frozen=True)
class Verdict:
    """The gate's result for one bug: the problem, or that its first test caught it."""

    bug: Bug
    seconds: float
    problem: str = ""


def gate(course: Course, bugs: Sequence[Bug], timeout: float) -> Iterator[Verdict]:
    """Prove that the first test of each bug passes without the bug and fails with it. Yields verdicts as runs end."""
    with ThreadPoolExecutor(AT_ONCE) as pool:
        reference = pool.submit(run_tests, course, sorted({bug.tests[0] for bug in bugs}), timeout=timeout)
        runs = {pool.submit(_with_bug, course, bug, timeout): bug for bug in bugs}
        try:
            for done in as_completed(runs):
                yield _verdict(runs[done], done.result(), reference.result())
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            stop_all()
            raise


def _with_bug(course: Course, bug: Bug, timeout: float) -> Run | CourseError:
    try:
        text = bug.planted((course.root / bug.file).read_text(encoding="utf-8"))
    except CourseError as error:
        return error
    with tempfile.TemporaryDirectory(prefix="course-") as scratch:
        write_atomically(Path(scratch) / bug.file, text.encode())
        return run_tests(course, bug.tests[:1], timeout=timeout, overlay=Path(scratch), options=["-x"])


def _verdict(bug: Bug, run: Run | CourseError, reference: Run) -> Verdict:
    if isinstance(run, CourseError):
        return Verdict(bug, 0.0, str(run))
    passes = {result.id for result in reference.results if result.outcome == "passed"}
    if not any(_is_of(id, bug.tests[0]) for id in passes):
        return Verdict(
            bug, run.seconds, f"{bug.tests[0]} does not pass without the bug: {shorten(reference.last_line)}"
        )
    if run.broken:
        return Verdict(bug, run.seconds, f"{run.broken[0].id} cannot be collected: {shorten(run.broken[0].error)}")
    if not run.collected:
        return Verdict(bug, run.seconds, f"no test ran with the bug: {shorten(run.last_line)}")
    if not run.failures and not run.stopped:
        return Verdict(bug, run.seconds, f"{bug.tests[0]} passes with the bug")
    return Verdict(bug, run.seconds)


def _is_of(nodeid: str, test: str) -> bool:
    return nodeid == test or nodeid.startswith((f"{test}::", f"{test}["))


def failing(run: Run) -> Iterable[str]:
    """A line for each failure of a check, and for an end before its time."""
    yield from (result.line for result in run.failures)
    if run.stopped:
        yield f"{run.where}: {run.stopped}"

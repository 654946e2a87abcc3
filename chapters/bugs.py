"""Bugs that shipped in real engines, each a small mutation of a module: planted for the reader, caught by the gate."""

from __future__ import annotations

import re
import shutil
import tempfile
import textwrap
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chapters.course import Course, CourseError, Phase, write_atomically
from chapters.testing import Run, Runners, shorten

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
    fields: dict[str, Any] = {name: table[name].strip() for name in _TEXTS}
    fields |= {name: tuple(table[name]) for name in _LISTS}
    fields["hints"] = tuple(" ".join(hint.split()) for hint in fields["hints"])
    for name in ("symptom", "explanation"):  # a paragraph is one line: the terminal wraps it
        fields[name] = "\n\n".join(" ".join(part.split()) for part in fields[name].split("\n\n"))
    return Bug(**fields, edits=tuple((edit["before"], edit["after"]) for edit in table["edit"]))


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


def put_away(course: Course) -> Path:
    """Move what is planted to the backups, so that the phases run without it. Returns where it is now."""
    backups = course.private / "backups" / "bugs"
    backups.mkdir(parents=True, exist_ok=True)
    target = backups / f"{len(list(backups.iterdir())) + 1}"
    shutil.move(folder(course), target)
    return target


def plant(course: Course, bug: Bug) -> None:
    """Copy the modules of the bug's phase, one of them with the bug."""
    target = folder(course)
    if target.exists():
        put_away(course)
    package = course.root / bug.file.partition("/")[0]
    for path in package.rglob("*.py"):
        name = course.name(path)
        if "lab" not in path.relative_to(package).parts:
            text = path.read_text(encoding="utf-8")
            write_atomically(target / name, (bug.planted(text) if name == bug.file else text).encode())
    write_atomically(target / "repro.py", f"{bug.repro}\n".encode())
    report = "\n\n".join(textwrap.fill(part, 100) for part in bug.symptom.split("\n\n"))
    write_atomically(target / f"{bug.id}.md", f"# Bug {bug.id}\n\n{report}\n".encode())


def current(course: Course) -> Bug:
    """The bug that is planted now."""
    reports = sorted(folder(course).glob("*.md"))
    if not reports:
        raise CourseError("no bug is planted: `python -m chapters break N` plants one of phase N")
    return find(course, reports[0].stem)


# The gate


@dataclass(frozen=True)
class Verdict:
    """The gate's result for one bug: the problem, or none if its first test caught it."""

    bug: Bug
    seconds: float
    problem: str


def gate(course: Course, bugs: Sequence[Bug], timeout: float) -> Iterator[Verdict]:
    """Prove that the first test of each bug fails with the bug, and passes without it. Yields the verdicts in order."""
    with Runners(course) as runners, ThreadPoolExecutor(runners.size) as pool:
        try:
            runs = list(pool.map(lambda bug: _with_bug(course, bug, runners, timeout), bugs))
            reference = runners.run({bug.tests[0] for bug in bugs}, timeout=timeout * len(bugs))
        except BaseException:
            runners.close()
            raise
    passed = {result.id for result in reference.results if result.outcome == "passed"}
    for bug, run in zip(bugs, runs, strict=True):
        test, problem = bug.tests[0], _survived(bug, run)
        if not problem and not any(id == test or id.startswith((f"{test}::", f"{test}[")) for id in passed):
            problem = f"{test} does not pass without the bug: {shorten(reference.stopped or reference.last_line)}"
        yield Verdict(bug, run.seconds, problem)


def _with_bug(course: Course, bug: Bug, runners: Runners, timeout: float) -> Run:
    with tempfile.TemporaryDirectory(prefix="course-") as scratch:
        text = bug.planted((course.root / bug.file).read_text(encoding="utf-8"))
        write_atomically(Path(scratch) / bug.file, text.encode())
        return runners.run(bug.tests[:1], timeout=timeout, overlay=Path(scratch), options=["--exitfirst"])


def _survived(bug: Bug, run: Run) -> str:
    """Why the bug does not count as caught; empty if it does. A run that it stopped has caught it."""
    if run.broken:
        return f"with the bug, {run.broken[0].id} cannot be collected: {shorten(run.broken[0].error)}"
    if not run.collected:
        return f"with the bug, no test ran: {shorten(run.last_line)}"
    return "" if run.failures or run.stopped else f"{bug.tests[0]} passes with the bug"


def failing(run: Run) -> Iterable[str]:
    """A line for each failure of a check, and for an end before its time."""
    yield from (result.line for result in run.failures)
    if run.stopped:
        yield f"{run.where}: {run.stopped}"

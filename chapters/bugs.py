"""Bugs that shipped in real engines, each a small mutation of a module: planted for the reader, caught by the gate."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chapters.course import Course, CourseError, write_atomically
from chapters.workspace import back_up


@dataclass(frozen=True)
class Bug:
    """One bug, as its TOML file defines it. The first of `tests` is the fastest that fails with the bug; all of them
    pass once it is mended. `edit` has the lines before and after, which are once in `file`."""

    id: str
    title: str
    file: str
    symptom: str
    repro: str
    explanation: str
    hints: tuple[str, ...]
    sources: tuple[str, ...]
    tests: tuple[str, ...]
    edit: tuple[dict[str, str], ...]

    @property
    def chapter(self) -> int:
        return int(self.id[:-1])

    @property
    def package(self) -> str:
        """The phase that its file belongs to."""
        return self.file.partition("/")[0]

    @property
    def key(self) -> str:
        """The name of its progress in the stored state."""
        return f"bug {self.id}"

    def planted(self, text: str) -> str:
        """The text of its file with the bug."""
        for edit in self.edit:
            if (times := text.count(edit["before"])) != 1:
                raise CourseError(
                    f"bug {self.id}: the text to replace is {times} times in {self.file}:\n{edit['before']}"
                )
            text = text.replace(edit["before"], edit["after"])
        return text


def load(course: Course, chapter: int) -> tuple[Bug, ...]:
    """The bugs of a chapter, in the order of their file; none if there is no file."""
    return course.tables(chapter, "bugs", "bug", _bug)


def _bug(table: dict[str, Any]) -> Bug:
    fields: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value.strip() for name, value in table.items()
    }
    for name in ("symptom", "explanation"):  # a paragraph is one line: the terminal wraps it
        fields[name] = "\n\n".join(" ".join(part.split()) for part in table[name].split("\n\n"))
    return Bug(**fields | {"hints": tuple(" ".join(hint.split()) for hint in table["hints"])})


def every(course: Course) -> tuple[Bug, ...]:
    return tuple(bug for chapter in course.chapters_with("bugs") for bug in load(course, chapter))


def find(course: Course, id: str) -> Bug:
    known = {bug.id: bug for bug in every(course)}
    if id not in known:
        raise CourseError(f"there is no bug {id}; the bugs are: {', '.join(known) or 'none'}")
    return known[id]


def choose(course: Course, what: str) -> tuple[Bug, ...]:
    """The bugs of the chapter with this number, or the bug with this id."""
    if not what.isdecimal():
        return (find(course, what),)
    its = load(course, int(what))
    if not its:
        raise course.has_none(int(what), "bugs", "bugs")
    return its


def folder(course: Course) -> Path:
    """Where a bug is planted: a copy of the modules of its phase, its report and its reproduction."""
    return course.workspace / "bug"


def files(course: Course) -> dict[str, str]:
    """The modules of the planted copy, by their names in the checkout."""
    where = folder(course)
    return {
        path.relative_to(where).as_posix(): path.read_text(encoding="utf-8") for path in where.glob("phase*/**/*.py")
    }


def written_test(course: Course) -> Path:
    """Where the reader of a hunt by symptom writes a test. In the other grades there is none."""
    return folder(course) / "test_bug.py"


BEGUN = '''"""{about}: write the report as a test. It fails on this code, and passes on the sound one."""


def test_bug() -> None:
    raise NotImplementedError
'''


def plant(course: Course, bug: Bug, grade: int) -> None:
    """Copy the modules of the bug's phase, one of them with the bug. In grade 1 a test is to be written, in the others
    the reproduction is there."""
    target = folder(course)
    if target.exists():
        back_up(course, [target])
    package = course.root / bug.package
    for path in package.rglob("*.py"):
        name = course.name(path)
        if "lab" not in path.relative_to(package).parts:
            text = path.read_text(encoding="utf-8")
            write_atomically(target / name, (bug.planted(text) if name == bug.file else text).encode())
    begun = BEGUN.format(about=f"Bug {bug.id}")
    file, text = (written_test(course), begun) if grade == 1 else (target / "repro.py", f"{bug.repro}\n")
    write_atomically(file, text.encode())
    report = "\n\n".join(textwrap.fill(part, 100) for part in bug.symptom.split("\n\n"))
    write_atomically(target / f"{bug.id}.md", f"# Bug {bug.id}\n\n{report}\n".encode())


def current(course: Course) -> Bug:
    """The bug that is planted now."""
    reports = sorted(folder(course).glob("*.md"))
    if not reports:
        raise CourseError("no bug is planted: `python -m chapters break N` plants one of phase N")
    return find(course, reports[0].stem)

"""Bugs that shipped in real engines, each a small mutation of a module: planted for the reader, caught by the gate."""

from __future__ import annotations

import re
import shutil
import subprocess
import textwrap
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chapters.course import Course, CourseError, write_atomically
from chapters.workspace import back_up

OWN = "workspace/bug/test_bug.py"  # where the reader of a hunt by symptom writes a test
FILM = (
    "A film of it: `python -m phase5_continuous.lab explore --bug {id} --film workspace/bug/{id}.jsonl` finds the "
    "shortest story that shows the bug, and `nanoserve replay workspace/bug/{id}.jsonl -o workspace/bug/{id}.html` "
    "makes a page of it."
)


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

    def planted(self, text: str, tells: bool = False) -> str:
        """The text of its file with the bug. An error quotes the line that is not there only if it `tells`: a reader
        is looking for it."""
        for edit in self.edit:
            if (times := text.count(edit["before"])) != 1:
                why = f"bug {self.id}: the text to replace is {times} times in {self.file}:\n{edit['before']}"
                raise CourseError(why if tells else f"{self.file} differs from the release: restore it, then plant")
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
    film = FILM.format(id=table["id"])
    return Bug(
        **fields | {"hints": tuple(film if hint == "film" else " ".join(hint.split()) for hint in table["hints"])}
    )


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


def _names(course: Course) -> dict[str, str]:
    """The reports and Python files in the folder of the planted bug, with their texts."""
    where = folder(course)
    paths = (path for path in where.rglob("*") if path.suffix in (".md", ".py"))
    return {path.relative_to(where).as_posix(): path.read_text(encoding="utf-8") for path in paths}


def files(course: Course) -> dict[str, str]:
    """What a checkout with the planted bug holds: its modules under their own names, and beside them what the reader
    runs, under the names of the workspace."""
    names = {name: text for name, text in _names(course).items() if name.endswith(".py") and name != "conftest.py"}
    return {_name_in_copy(name): text for name, text in names.items()}


def _name_in_copy(name: str) -> str:
    return name if name.startswith("phase") else f"workspace/bug/{name}"


def in_copy(course: Course, argument: str) -> str:
    """An argument of a command that runs in such a checkout: a file of workspace/bug/ has its name there."""
    file, *test = argument.partition("::")
    path = Path(file).resolve()
    if path.suffix != ".py" or not path.is_relative_to(folder(course)):
        return argument
    return _name_in_copy(path.relative_to(folder(course)).as_posix()) + "".join(test)


BEGUN = '''"""Bug {id}: write the report as a test. It fails on this code, and passes on the sound one.

For example, this is a test of what the pool has when nothing runs:

    from phase1_kv_pool.allocator import PageAllocator
    assert PageAllocator(4).num_free == 4
"""


def test_bug() -> None:
    raise NotImplementedError
'''
ALONE = """import pytest


def pytest_configure() -> None:
    alone = "pytest alone imports the sound code; `python -m chapters break --test` runs test_bug.py with the bug"
    raise pytest.UsageError(alone)
"""


def _begun(course: Course, bug: Bug, grade: int) -> dict[str, str]:
    """The files of a hunt at its beginning: the modules of the bug's phase, one of them with the bug, and the report.
    In grade 1 a test is to be written, in the others the reproduction is there."""
    texts, package = dict[str, str](), course.root / bug.package
    for path in package.rglob("*.py"):
        name = course.name(path)
        if "lab" not in path.relative_to(package).parts:
            text = path.read_text(encoding="utf-8")
            texts[name] = bug.planted(text) if name == bug.file else text
    said = "\n\n".join(textwrap.fill(part, 100) for part in bug.symptom.split("\n\n"))
    texts[f"{bug.id}.md"] = f"# Bug {bug.id}, grade {grade}\n\n{said}\n"
    aid = {"test_bug.py": BEGUN.format(id=bug.id)} if grade == 1 else {"repro.py": f"{bug.repro}\n"}
    return texts | aid | {"conftest.py": ALONE}


def plant(course: Course, bug: Bug, grade: int) -> str:
    """Begin a hunt, or change its grade, which keeps the reader's test. Returns what became of the hunt before."""
    texts, target, before = _begun(course, bug, grade), folder(course), report(course)
    own = target / "test_bug.py"
    written = own.read_text(encoding="utf-8") if own.is_file() else ""
    if before is not None and before.stem == bug.id and written not in ("", BEGUN.format(id=bug.id)):
        texts["test_bug.py"] = written
    part = course.private / "planting"  # half a copy is never in the workspace
    shutil.rmtree(part, ignore_errors=True)
    for name, text in texts.items():
        write_atomically(part / name, text.encode())
    said = put_away(course) if target.exists() else ""
    target.parent.mkdir(exist_ok=True)
    shutil.move(part, target)
    return said


def put_away(course: Course) -> str:
    """End a hunt: what the reader has touched moves to the backups. Returns a sentence that says so."""
    of, where = report(course), folder(course)
    what = f"Bug {of.stem}" if of else "What was in workspace/bug/"
    with suppress(CourseError):  # the release has changed since
        begun, there = _begun(course, find(course, of.stem), grade(course)) if of else {}, _names(course)
        if there == begun and len(there) == sum(path.is_file() for path in where.rglob("*")):
            shutil.rmtree(where)
            return f"{what} is put away."
    return f"{what} is put away. The files are in {course.name(back_up(course, [where]))}/."


def changed(course: Course, bug: Bug) -> str:
    """The files of its phase that git says have changed since the last commit; nothing if there is no git."""
    with suppress(OSError):
        asked = ["git", "-C", str(course.root), "status", "--porcelain", "--", bug.package]
        return ", ".join(line[3:] for line in subprocess.run(asked, capture_output=True, text=True).stdout.splitlines())
    return ""


def report(course: Course) -> Path | None:
    """What the user said of the bug that is planted now, if one is: the file is named by its id."""
    return next(iter(sorted(folder(course).glob("[0-9]*.md"))), None)


def grade(course: Course) -> int:
    """The grade of the hunt: its report says it."""
    of = report(course)
    known = re.match(r"# Bug \w+, grade (\d)", of.read_text(encoding="utf-8")) if of else None
    return int(known[1]) if known else 2


def current(course: Course) -> Bug:
    """The bug that is planted now."""
    if (of := report(course)) is None:
        raise CourseError("no bug is planted: `python -m chapters break N` plants one of chapter N")
    return find(course, of.stem)


def written_test(course: Course) -> str:
    """The test that the reader has written."""
    path = course.root / OWN
    if not path.is_file():
        raise CourseError(f"{OWN} is missing: write it first")
    text = path.read_text(encoding="utf-8")
    if text == BEGUN.format(id=current(course).id):
        raise CourseError(f"you have not written it yet: {OWN} is to fail with the bug and to pass without it")
    return text

"""The workspace: files with blank regions, the answers written there, and the stored progress."""

from __future__ import annotations

import difflib
import hashlib
import json
import re
import shutil
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, cast

from chapters.course import Course, CourseError, write_atomically
from chapters.exercises import Exercise, blanked, every, load, need, on_path
from chapters.source import find_regions, replace_regions, unmarked

_ASKED = re.compile(r"^[ \t]*# ?region exercise (\d+\.\d+)[ \t]*$", re.MULTILINE)


@dataclass(frozen=True)
class Progress:
    """The stored progress of an exercise: hints seen, the last result, the fingerprint of the answer that had it, and
    whether it has ever passed."""

    hints: int = 0
    result: str | None = None
    answer: str | None = None
    passed: bool = False


class State:
    """`.course/state.json`. Each change is written immediately and atomically."""

    def __init__(self, course: Course) -> None:
        self._path = course.private / "state.json"

    def of(self, id: str) -> Progress:
        try:
            return Progress(**self._read().get(id, {}))
        except (TypeError, ValueError, AttributeError) as error:
            where = ".course/state.json"
            raise CourseError(f"{where} cannot be read ({error}); repair it, or move it away to start over") from None

    def record(self, id: str, result: str, answer: str | None = None) -> Progress:
        """Store the result of a check."""
        passed = self.of(id).passed or result in ("passed", "mended")
        return self.update(id, result=result, answer=answer, passed=passed)

    def update(self, id: str, **changes: Any) -> Progress:
        progress = replace(self.of(id), **changes)
        known = self._read() | {id: asdict(progress)}
        write_atomically(self._path, (json.dumps(known, indent=2, sort_keys=True) + "\n").encode())
        return progress

    def _read(self) -> dict[str, dict[str, Any]]:
        text = self._path.read_text(encoding="utf-8") if self._path.exists() else "{}"
        return cast(dict[str, dict[str, Any]], json.loads(text))


def by_file(exercises: Iterable[Exercise]) -> dict[str, list[Exercise]]:
    files: dict[str, list[Exercise]] = {}
    for exercise in exercises:
        files.setdefault(exercise.file, []).append(exercise)
    return files


def put(course: Course, file: str) -> set[str]:
    """The exercises that the workspace's copy of `file` asks for."""
    path = course.workspace / file
    return set(_ASKED.findall(path.read_text(encoding="utf-8", errors="replace"))) if path.is_file() else set()


def begun(course: Course) -> tuple[Exercise, ...]:
    """The exercises in the workspace. Those of a chapter's path belong to it even if one's file or marker is gone."""
    found: list[Exercise] = []
    for chapter in course.chapters_with("exercises"):
        its = load(course, chapter)
        there = [each for each in its if each.id in put(course, each.file)]
        if there:
            found += [each for each in its if each in there or each in on_path(its)]
    return tuple(found)


def start(course: Course, chapter: int, fresh: bool = False, every_one: bool = False) -> tuple[list[Path], Path | None]:
    """Put a chapter's exercises, blank, into the workspace: the core ones, or all; the answers that it holds stay.
    Returns the files, and the backup if one was made. Where nothing is new, or code outside of the exercises was
    edited, it is an error to overwrite work; with `fresh` the files move to `.course/backups/<n>/`."""
    its = need(course, chapter)
    there = {each for each in every(course) if each.id in put(course, each.file)}
    chosen = {*(its if every_one else on_path(its)), *there.intersection(its)}
    over = fresh or chosen <= there
    texts, edited = dict[Path, str](), list[str]()
    for file, here in by_file(every(course)).items():
        new = [each for each in here if each in chosen and (over or each not in there)]
        kept = [each for each in here if each in there and each not in new]
        if not new:
            continue
        path = course.workspace / file
        texts[path] = _composed(course, file, [*kept, *new], kept)
        untouched = texts[path] if over else _composed(course, file, kept, kept)
        if path.exists() and path.read_bytes() != untouched.encode():
            edited.append(course.name(path))
    if edited and not fresh:
        raise CourseError(
            f"the workspace holds your work in {', '.join(edited)}. `python -m chapters check {chapter}` tests "
            f"it; `start {chapter} --fresh` starts over and moves the old files to .course/backups/"
        )
    present = [path for path in texts if path.exists()]
    backup = back_up(course, present) if fresh and present else None
    for path, text in texts.items():
        write_atomically(path, text.encode())
    tutor = course.workspace / "AGENTS.md"  # a coding assistant reads it
    if not tutor.exists():
        write_atomically(tutor, (Path(__file__).parent / "tutor.txt").read_bytes())
    return list(texts), backup


def _composed(course: Course, file: str, asked: Sequence[Exercise], kept: Sequence[Exercise]) -> str:
    """The reference's text of `file` with these exercises blank, apart from the `kept` ones, which are as the workspace
    has them. A comment says where the answer to another exercise is given."""
    names = {each.region for each in asked}
    text = unmarked(blanked(course, file, asked), names.__contains__, given=True)
    with suppress(OSError, CourseError):  # no file yet, or one with broken markers
        theirs = (course.workspace / file).read_text(encoding="utf-8")
        regions, lines = find_regions(theirs, file), theirs.split("\n")
        texts = {each.region: [piece.body(lines) for piece in regions[each.region]] for each in kept}
        text = replace_regions(text, file, texts)
    return text


def back_up(course: Course, paths: Iterable[Path]) -> Path:
    """Move files or folders of the workspace to the backups, so that nothing runs with them. Returns where they are."""
    backups = course.private / "backups"
    taken = [int(path.name) for path in backups.glob("*") if path.name.isdecimal()]
    target = backups / str(max(taken, default=0) + 1)
    for path in paths:
        place = target / path.relative_to(course.workspace)
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(path, place)
    return target


def attempt(course: Course, exercise: Exercise) -> tuple[str, str]:
    """The stage of an exercise before any test runs: attempted, not begun, region missing or syntax error; and what is
    wrong with its file. An error in one region is no error of the others in its file."""
    path = course.workspace / exercise.file
    name = course.name(path)
    try:
        text = _answered(course, exercise.file, [exercise])
        compile(text, name, "exec", dont_inherit=True)
    except SyntaxError as error:
        line = source_line(path.read_text(encoding="utf-8"), text, error.lineno or 1) or "?"
        return "syntax error", f"{name}:{line}: {error.msg}"
    except OSError:
        return "region missing", f"{name} is gone"
    except (ValueError, CourseError) as error:
        return "region missing", str(error)
    return ("not begun" if exercise.is_blank(text) else "attempted"), ""


def _answered(course: Course, file: str, answers: Iterable[Exercise]) -> str:
    """The workspace's text of `file` with the reference in all regions except `answers`."""
    name, kept = f"workspace/{file}", {exercise.region for exercise in answers}
    text, reference = ((folder / file).read_text(encoding="utf-8") for folder in (course.workspace, course.root))
    present, lines = find_regions(text, name), reference.split("\n")
    if missing := kept - present.keys():
        raise CourseError(f"`# region {min(missing)}` is not in {name}")
    regions = {region: pieces for region, pieces in find_regions(reference, file).items() if region in present}
    fill = {
        region: [piece.body(lines) for piece in pieces]
        for region, pieces in regions.items()
        if region.startswith("exercise ") and region not in kept
    }
    return replace_regions(text, name, fill)


def answered(course: Course, answers: Iterable[Exercise]) -> dict[str, str]:
    """The workspace's files with these answers, and with the reference in the other regions."""
    return {file: _answered(course, file, its) for file, its in by_file(answers).items()}


def fingerprint(course: Course, exercise: Exercise) -> str:
    """Identifies the content of an exercise's file: another one means that its last result may not hold any more."""
    path = course.workspace / exercise.file
    try:
        text = unmarked(_answered(course, exercise.file, [exercise]))
    except (CourseError, OSError, ValueError):  # an editor may replace files in between
        text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def place(course: Course, exercise: Exercise) -> str:
    """The line of the workspace at which an exercise begins."""
    path = course.workspace / exercise.file
    region = find_regions(path.read_text(encoding="utf-8"), course.name(path))[exercise.region][0]
    return f"{course.name(path)}:{region.first + 1}"


def workspace_line(course: Course, copy: Path, file: str, line: int) -> str:
    """The workspace's `file:line` for a line of a copy; empty if that line is the reference's."""
    if not (course.workspace / file).is_file():
        return ""
    theirs, ours = ((folder / file).read_text(encoding="utf-8") for folder in (course.workspace, copy))
    found = source_line(theirs, ours, line)
    return f"workspace/{file}:{found}" if found else ""


def source_line(theirs: str, ours: str, line: int) -> int | None:
    """The line of `theirs` that a line of `ours` was copied from, both counted from 1."""
    matcher = difflib.SequenceMatcher(None, ours.split("\n"), theirs.split("\n"), autojunk=False)
    for match in matcher.get_matching_blocks():
        if match.a < line <= match.a + match.size:
            return line - match.a + match.b
    return None


def solution(course: Course, exercise: Exercise) -> list[str]:
    """A unified diff from the workspace's region, or from the blank if there is none, to the reference."""

    def region(text: str) -> list[str]:
        lines = text.split("\n")
        return [line for piece in find_regions(text, "")[exercise.region] for line in piece.body(lines)]

    path = course.workspace / exercise.file
    before, label = region(blanked(course, exercise.file, [exercise])), "blank"
    if path.is_file() and exercise.region in find_regions(text := path.read_text(encoding="utf-8"), course.name(path)):
        before, label = region(text), course.name(path)
    after = region((course.root / exercise.file).read_text(encoding="utf-8"))
    return list(difflib.unified_diff(before, after, label, exercise.file, lineterm=""))

"""The workspace: files with blank regions, the answers written there, and the stored progress."""

from __future__ import annotations

import difflib
import hashlib
import json
import shutil
from collections.abc import Collection, Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, cast

from chapters.course import Course, CourseError, Phase, write_atomically
from chapters.exercises import Exercise, blanked, need
from chapters.source import find_regions, replace_regions

Stage = Literal["attempted", "partly written", "not begun", "region missing", "syntax error"]


@dataclass(frozen=True)
class Attempt:
    """The stage of an exercise before any test runs; `note` says what is wrong with its file, or which functions are
    not written yet."""

    exercise: Exercise
    stage: Stage
    note: str = ""


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

    def record(self, id: str, result: str, answer: str) -> Progress:
        """Store the result of a check."""
        return self.update(id, result=result, answer=answer, passed=self.of(id).passed or result == "passed")

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


def started_phases(course: Course) -> tuple[Phase, ...]:
    """The phases that have a folder in the workspace."""
    return tuple(phase for phase in course.phases() if (course.workspace / phase.package).is_dir())


def start(course: Course, phase: Phase, fresh: bool = False) -> tuple[list[Path], Path | None]:
    """Copy the phase's files with blank exercises into the workspace. Returns them, and the backup if one was made.
    Edited files are never overwritten: they are an error; with `fresh` the folder moves to `.course/backups/<n>/`."""
    texts = {course.workspace / file: blanked(course, file, its) for file, its in by_file(need(course, phase)).items()}
    folder = course.workspace / phase.package
    edited = [course.name(path) for path, text in texts.items() if path.exists() and path.read_bytes() != text.encode()]
    if edited and not fresh:
        raise CourseError(
            f"the workspace holds your work in {', '.join(edited)}. `python -m chapters check {phase.number}` tests "
            f"it; `start {phase.number} --fresh` starts over and moves the old files to .course/backups/"
        )
    backup = _back_up(course, folder) if fresh and folder.exists() else None
    for path, text in texts.items():
        write_atomically(path, text.encode())
    return list(texts), backup


def _back_up(course: Course, folder: Path) -> Path:
    backups = course.private / "backups"
    taken = [int(path.name) for path in backups.glob("*") if path.name.isdecimal()]
    target = backups / str(max(taken, default=0) + 1)
    target.mkdir(parents=True)
    shutil.move(folder, target / folder.name)
    return target


def fresh_folder(course: Course, command: str, phase: Phase) -> Path:
    """An empty folder for the files that a command assembles."""
    folder = course.private / command / phase.package
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    return folder


def attempt(course: Course, exercise: Exercise) -> Attempt:
    """The stage of an exercise. An error in one region is no error of the others in its file."""
    path = course.workspace / exercise.file
    name = course.name(path)
    if not path.is_file():
        return Attempt(exercise, "region missing", f"{name} is gone")
    try:
        pieces = find_regions(path.read_text(encoding="utf-8"), name).get(exercise.region)
        if pieces is None:
            return Attempt(exercise, "region missing", f"`# region {exercise.region}` is not in {name}")
        text = answered(course, exercise.file, [exercise])
        compile(text, name, "exec", dont_inherit=True)
    except SyntaxError as error:
        line = source_line(path.read_text(encoding="utf-8"), text, error.lineno or 1) or "?"
        return Attempt(exercise, "syntax error", f"{name}:{line}: {error.msg}")
    except (ValueError, CourseError) as error:
        return Attempt(exercise, "region missing", str(error))
    names, untouched = exercise.unwritten(text)
    if untouched:
        return Attempt(exercise, "not begun")
    if names:
        return Attempt(exercise, "partly written", f"not written yet: {', '.join(names)}")
    return Attempt(exercise, "attempted")


def answered(course: Course, file: str, answers: Collection[Exercise]) -> str:
    """The workspace's text of `file` with the reference in all regions but those of `answers`."""
    path = course.workspace / file
    text, reference = path.read_text(encoding="utf-8"), (course.root / file).read_text(encoding="utf-8")
    there, kept = find_regions(text, course.name(path)), {exercise.region for exercise in answers}
    regions = {name: pieces for name, pieces in find_regions(reference, file).items() if name.startswith("exercise ")}
    lines = reference.split("\n")
    fill = {
        name: [piece.body(lines) for piece in pieces] for name, pieces in regions.items() if name in there.keys() - kept
    }
    return replace_regions(text, course.name(path), fill)


def content(course: Course, exercise: Exercise) -> str:
    """The file of an exercise with its answer, and the reference in the other regions if the markers are there."""
    path = course.workspace / exercise.file
    try:
        return answered(course, exercise.file, [exercise])
    except CourseError:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError):  # an editor may replace files in between
        return ""


def fingerprint(course: Course, exercise: Exercise) -> str:
    """Identifies the content of an exercise's file: another one means that its last result may not hold any more."""
    return hashlib.sha256(content(course, exercise).encode()).hexdigest()[:16]


def place(course: Course, exercise: Exercise) -> str:
    """The line of the workspace at which an exercise begins."""
    path = course.workspace / exercise.file
    region = find_regions(path.read_text(encoding="utf-8"), course.name(path))[exercise.region][0]
    return f"{course.name(path)}:{region.first + 1}"


def assemble(course: Course, answers: Iterable[Exercise], into: Path) -> None:
    """Write the workspace's files with these answers under `into`; elsewhere the reference is used."""
    for file, its in by_file(answers).items():
        write_atomically(into / file, answered(course, file, its).encode())


def workspace_line(course: Course, assembled: Path, file: Path, line: int) -> str:
    """The workspace's `file:line` for a line of an assembled file; empty if that line is the reference's."""
    theirs, ours = ((folder / file).read_text(encoding="utf-8") for folder in (course.workspace, assembled))
    found = source_line(theirs, ours, line)
    return f"{course.name(course.workspace / file)}:{found}" if found else ""


def source_line(theirs: str, ours: str, line: int) -> int | None:
    """The line of `theirs` that a line of `ours` was copied from, both counted from 1."""
    matcher = difflib.SequenceMatcher(None, ours.split("\n"), theirs.split("\n"), autojunk=False)
    for match in matcher.get_matching_blocks():
        if match.a < line <= match.a + match.size:
            return line - match.a + match.b
    return None


def region_body(text: str, where: str, exercise: Exercise) -> list[str]:
    """The lines of the exercise's region; an empty one between its pieces."""
    lines = text.split("\n")
    pieces = [piece.body(lines) for piece in find_regions(text, where)[exercise.region]]
    return [line for number, piece in enumerate(pieces) for line in [*[""][: number > 0], *piece]]


def solution(course: Course, exercise: Exercise) -> list[str]:
    """A unified diff from the workspace's region, or from the blank if there is none, to the reference."""
    reference = (course.root / exercise.file).read_text(encoding="utf-8")
    path = course.workspace / exercise.file
    before, label = region_body(blanked(course, exercise.file, [exercise]), exercise.file, exercise), "blank"
    if path.is_file():
        text = path.read_text(encoding="utf-8")
        if exercise.region in find_regions(text, course.name(path)):
            before, label = region_body(text, course.name(path), exercise), course.name(path)
    after = region_body(reference, exercise.file, exercise)
    return list(difflib.unified_diff(before, after, label, exercise.file, lineterm=""))

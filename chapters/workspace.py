"""The workspace: files with blank regions, the answers written there, and the stored progress."""

from __future__ import annotations

import difflib
import json
import shutil
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, cast

from chapters.course import Course, CourseError, Phase, write_atomically
from chapters.exercises import Exercise, blanked, load, need
from chapters.source import find_regions, replace_bodies

Stage = Literal["attempted", "not started", "region missing", "syntax error"]


@dataclass(frozen=True)
class Attempt:
    """The stage of an exercise before any test runs; `note` says what is wrong with its file, if anything."""

    exercise: Exercise
    stage: Stage
    note: str = ""


@dataclass(frozen=True)
class Progress:
    """The stored progress of an exercise: hints seen, the last result, and whether it has ever passed."""

    hints: int = 0
    result: str | None = None
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


def assemble(course: Course, phase: Phase, into: Path, only: Exercise | None = None) -> list[Attempt]:
    """Write the workspace's files under `into`, with the reference in regions that are still blank, or in all but that
    of `only`. A file that is missing, does not parse or has broken markers is left out, so the reference is used."""
    attempts: list[Attempt] = []
    for file, its in by_file(load(course, phase)).items():
        path = course.workspace / file
        name = course.name(path)
        if not path.is_file():
            attempts += [Attempt(exercise, "region missing", f"{name} is gone") for exercise in its]
            continue
        try:
            text = path.read_text(encoding="utf-8")
            compile(text, name, "exec", dont_inherit=True)
            regions = find_regions(text, name)
        except SyntaxError as error:
            attempts += [Attempt(exercise, "syntax error", f"{name}:{error.lineno}: {error.msg}") for exercise in its]
            continue
        except (ValueError, CourseError) as error:
            attempts += [Attempt(exercise, "region missing", str(error)) for exercise in its]
            continue
        reference = (course.root / file).read_text(encoding="utf-8")
        fill: dict[str, list[str]] = {}
        for exercise in its:
            if exercise.region not in regions:
                attempts.append(Attempt(exercise, "region missing", f"`# region {exercise.region}` is not in {name}"))
            elif only not in (None, exercise) or exercise.is_blank(regions[exercise.region].body(text.split("\n"))):
                fill[exercise.region] = region_body(reference, file, exercise)
                attempts.append(Attempt(exercise, "not started"))
            else:
                attempts.append(Attempt(exercise, "attempted"))
        write_atomically(into / file, replace_bodies(text, name, fill).encode())
    return attempts


def workspace_line(course: Course, assembled: Path, file: Path, line: int) -> str:
    """The workspace's `file:line` for a line of an assembled file; empty if that line is the reference's."""
    theirs, ours = ((folder / file).read_text(encoding="utf-8").split("\n") for folder in (course.workspace, assembled))
    for match in difflib.SequenceMatcher(None, ours, theirs, autojunk=False).get_matching_blocks():
        if match.a < line <= match.a + match.size:
            return f"{course.name(course.workspace / file)}:{line - match.a + match.b}"
    return ""


def region_body(text: str, where: str, exercise: Exercise) -> list[str]:
    return find_regions(text, where)[exercise.region].body(text.split("\n"))


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

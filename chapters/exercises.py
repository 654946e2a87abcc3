"""Exercises: a marked region of the source, a question, hints, and the tests that judge it."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chapters.course import Course, CourseError
from chapters.source import Body, bodies, find_regions, replace_lines

RUNS = ("everywhere", "gpu", "cpu", "tests")  # "tests": in no server, for it is a lab, or an oracle of kernels


@dataclass(frozen=True)
class Exercise:
    """One exercise, as its TOML file defines it. `tests` are test files or node ids, relative to the root. `large`
    marks the one that is most of a layer, `core` one of the path through part I. `runs` says where a server may run
    it: one of RUNS."""

    id: str
    title: str
    file: str
    question: str
    hints: tuple[str, ...]
    tests: tuple[str, ...]
    large: bool = False
    core: bool = False
    runs: str = "everywhere"

    @property
    def region(self) -> str:
        return f"exercise {self.id}"

    @property
    def chapter(self) -> int:
        return int(self.id.partition(".")[0])

    @property
    def package(self) -> str:
        """The phase that its file belongs to."""
        return self.file.partition("/")[0]

    @property
    def named(self) -> str:
        """What a failure contains that the blank exercise has caused."""
        return f"{self.region}: {self.title}"

    @property
    def error(self) -> str:
        """The statement that stands where the answer belongs."""
        return f"raise NotImplementedError({json.dumps(self.named, ensure_ascii=False)})"

    def bodies(self, text: str) -> list[Body]:
        """What is to be written, in this text of its file."""
        return bodies(text, find_regions(text, self.file).get(self.region, []))

    def code(self, text: str) -> list[list[str]]:
        """The lines of code in each of the bodies."""
        return [body.code(text.split("\n")) for body in self.bodies(text)]

    def is_blank(self, text: str) -> bool:
        """Whether nothing is written yet in this text of its file."""
        return all(code in ([self.error], [self.error, "yield"]) for code in self.code(text))


def blanked(course: Course, file: str, exercises: Iterable[Exercise]) -> str:
    """The text of `file` without the answers to these exercises: the question stands above the first piece, and an
    error that names the exercise in each body."""
    text = (course.root / file).read_text(encoding="utf-8")
    regions = find_regions(text, file)
    pieces: list[tuple[int, int, list[str]]] = []
    for exercise in exercises:
        above = regions[exercise.region][0]
        question = [f"{above.indent}# {line}".rstrip() for line in exercise.question.strip().split("\n")]
        pieces.append((above.first + 1, above.first + 1, question))
        for body in exercise.bodies(text):
            stays = [f"{body.indent}yield"] if body.is_async_generator else []  # else it would be a coroutine
            pieces.append((body.first, body.last, [body.indent + exercise.error, *stays]))
    return replace_lines(text, pieces)


def answer_lines(root: Path, exercise: Exercise) -> int:
    """The number of lines of code in the answer: the reference's, or another root's."""
    return sum(map(len, exercise.code((root / exercise.file).read_text(encoding="utf-8"))))


def load(course: Course, chapter: int) -> tuple[Exercise, ...]:
    """The exercises of a chapter; none if there is no file."""
    return course.tables(chapter, "exercises", "exercise", lambda table: _exercise(course, table))


def on_path(its: Iterable[Exercise]) -> tuple[Exercise, ...]:
    """Those of a chapter's exercises that a reader meets first: the ones of the core, or all where none is."""
    its = tuple(its)
    return tuple(exercise for exercise in its if exercise.core) or its


def every(course: Course) -> tuple[Exercise, ...]:
    return tuple(exercise for chapter in course.chapters_with("exercises") for exercise in load(course, chapter))


def _exercise(course: Course, table: dict[str, Any]) -> Exercise:
    hints = tuple(" ".join(hint.split()) for hint in table["hints"])  # one line: the terminal wraps it
    exercise = Exercise(**table | {"hints": hints, "tests": tuple(table["tests"])})
    if exercise.runs not in RUNS:
        raise CourseError(f"exercise {exercise.id}: runs must be one of {', '.join(RUNS)}, got '{exercise.runs}'")
    text = (course.root / exercise.file).read_text(encoding="utf-8")
    if not exercise.bodies(text):
        raise CourseError(f"{exercise.file} has no `# region {exercise.region}` with a body to write")
    return exercise


def need(course: Course, chapter: int) -> tuple[Exercise, ...]:
    """Like `load`, but a chapter without exercises is an error."""
    exercises = load(course, chapter)
    if not exercises:
        raise course.has_none(chapter, "exercises", "exercises")
    return exercises


def find(course: Course, id: str) -> Exercise:
    """The exercise with this id, or an error that lists the ids of its chapter."""
    chapter = id.partition(".")[0]
    near = load(course, int(chapter)) if chapter.isdecimal() else ()
    known = {exercise.id: exercise for exercise in near or every(course)}
    if id not in known:
        raise CourseError(f"there is no exercise {id}; the exercises are: {', '.join(known) or 'none'}")
    return known[id]

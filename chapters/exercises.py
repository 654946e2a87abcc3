"""Exercises: a marked region of the source, a question, hints, and the tests that judge it."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chapters.course import Course, CourseError, Phase
from chapters.source import Body, bodies, find_regions, replace_lines

RUNS = ("everywhere", "gpu", "cpu", "tests")  # "tests": in no server, for it is a lab, or an oracle of kernels


@dataclass(frozen=True)
class Exercise:
    """One exercise, as its TOML file defines it. `tests` are test files or node ids, relative to the root. `large`
    marks the one that is most of a layer. `runs` says where a server may run it: one of RUNS."""

    id: str
    title: str
    file: str
    question: str
    hints: tuple[str, ...]
    tests: tuple[str, ...]
    large: bool = False
    runs: str = "everywhere"

    @property
    def region(self) -> str:
        return f"exercise {self.id}"

    @property
    def phase(self) -> int:
        return int(self.id.partition(".")[0])

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
    """The number of lines of code in the answer: the reference's, or that of another root."""
    return sum(map(len, exercise.code((root / exercise.file).read_text(encoding="utf-8"))))


def load(course: Course, phase: Phase) -> tuple[Exercise, ...]:
    """The exercises of a phase; none if there is no file."""
    return course.tables(f"{phase.number:02d}_exercises.toml", "exercise", lambda table: _exercise(course, table))


def _exercise(course: Course, table: dict[str, Any]) -> Exercise:
    hints = tuple(" ".join(hint.split()) for hint in table["hints"])  # one line: the terminal wraps it
    exercise = Exercise(**table | {"hints": hints, "tests": tuple(table["tests"])})
    if exercise.runs not in RUNS:
        raise CourseError(f"exercise {exercise.id}: runs must be one of {', '.join(RUNS)}, got '{exercise.runs}'")
    text = (course.root / exercise.file).read_text(encoding="utf-8")
    if not exercise.bodies(text):
        raise CourseError(f"{exercise.file} has no `# region {exercise.region}` with a body to write")
    return exercise


def need(course: Course, phase: Phase) -> tuple[Exercise, ...]:
    """Like `load`, but a phase without exercises is an error."""
    exercises = load(course, phase)
    if not exercises:
        raise CourseError(f"phase {phase.number} has no exercises")
    return exercises


def find(course: Course, id: str) -> Exercise:
    """The exercise with this id, or an error that lists the ids of its phase."""
    known = {exercise.id: exercise for phase in course.phases() for exercise in load(course, phase)}
    if id not in known:
        near = [other for other in known if other.startswith(f"{id.partition('.')[0]}.")]
        raise CourseError(f"there is no exercise {id}; the exercises are: {', '.join(near or known) or 'none'}")
    return known[id]

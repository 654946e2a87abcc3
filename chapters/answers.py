"""Other right answers to exercises: each is written differently from the reference, and its tests are to accept it."""

from __future__ import annotations

import textwrap
import tomllib
from dataclasses import dataclass

from chapters.course import Course, CourseError
from chapters.exercises import Exercise, every
from chapters.source import find_regions, replace_regions

FILE = "tests/chapters/answers.toml"


@dataclass(frozen=True)
class Answer:
    """An answer to the exercise of this title: the code of each piece of its region, and in what way it differs."""

    exercise: str
    way: str
    pieces: tuple[str, ...]

    def text(self, course: Course, exercise: Exercise) -> str:
        """The file of the exercise with this answer."""
        reference = (course.root / exercise.file).read_text("utf-8")
        indents = [region.indent for region in find_regions(reference, exercise.file)[exercise.region]]
        pieces = [
            textwrap.indent(textwrap.dedent(piece).strip("\n"), indent).split("\n")
            for piece, indent in zip(self.pieces, indents, strict=True)
        ]
        return replace_regions(reference, exercise.file, {exercise.region: pieces})


def load(course: Course) -> list[tuple[Exercise, Answer]]:
    """The answers, each with its exercise."""
    path = course.root / FILE
    tables = tomllib.loads(path.read_text("utf-8")).get("answer", ()) if path.is_file() else ()
    found = []
    for table in tables:
        title, file = table["exercise"], table.get("file")
        its = [each for each in every(course) if each.title == title and file in (None, each.file)]
        if len(its) != 1:
            raise CourseError(f"{FILE}: {len(its)} exercises have the title '{title}'; `file` may name one of several")
        found.append((its[0], Answer(title, table["way"], tuple(table["pieces"]))))
    return found

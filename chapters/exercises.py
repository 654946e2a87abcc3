"""Exercises: a marked region of the source, a question, hints, and the tests that judge it."""

from __future__ import annotations

import json
import re
import textwrap
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chapters.course import Course, CourseError, Phase
from chapters.source import Body, bodies, find_regions, replace_lines

_FIELDS: dict[str, type] = {"id": str, "title": str, "file": str, "question": str, "hints": list, "tests": list}
_WIDTH = 100
_ITEM = re.compile(r"(?:[-*]|\d+\.) ")


@dataclass(frozen=True)
class Exercise:
    """One exercise, as its TOML file defines it. `tests` are test files or node ids, relative to the root. `large`
    marks the one that is most of a layer."""

    id: str
    title: str
    file: str
    question: str
    hints: tuple[str, ...]
    tests: tuple[str, ...]
    large: bool = False

    @property
    def region(self) -> str:
        return f"exercise {self.id}"

    @property
    def phase(self) -> int:
        return int(self.id.partition(".")[0])

    def judged_by(self, nodeid: str) -> bool:
        """Whether this test is one of those that judge the exercise."""
        return any(nodeid == test or nodeid.startswith((f"{test}::", f"{test}[")) for test in self.tests)

    @property
    def error(self) -> str:
        """The statement that stands where the answer belongs."""
        return f"raise NotImplementedError({json.dumps(f'{self.region}: {self.title}', ensure_ascii=False)})"

    def asked(self, indent: str) -> list[str]:
        """The question as comments."""
        return [f"{indent}# {line}".rstrip() for line in _wrap(self.question, _WIDTH - len(indent) - 2)]

    def bodies(self, text: str) -> list[Body]:
        """What is to be written, in this text of its file."""
        return bodies(text, find_regions(text, self.file).get(self.region, []))

    def unwritten(self, text: str) -> tuple[list[str], bool]:
        """The names of the functions that still raise the error, and whether there is nothing else."""
        lines, start = text.split("\n"), f'raise NotImplementedError("{self.region}:'
        all_ = [(body.name, body.code(lines)) for body in self.bodies(text)]
        left = [(name, code) for name, code in all_ if any(line.startswith(start) for line in code)]
        untouched = len(left) == len(all_) and all(code[1:] in ([], ["yield"]) for _, code in left)
        return [name for name, _ in left], bool(left) and untouched


def _wrap(markdown: str, width: int) -> list[str]:
    """Wrap paragraphs, and list items with a hanging indent; keep quotes, tables, indented lines and fenced code."""
    lines: list[str] = []
    block: list[str] = []  # a paragraph, or an item of a list
    fenced = False

    def wrap() -> None:
        hanging = " " * len(item[0]) if block and (item := _ITEM.match(block[0])) else ""
        lines.extend(textwrap.wrap(" ".join(block), width, subsequent_indent=hanging, break_long_words=False))
        block.clear()

    for line in [*markdown.strip().split("\n"), ""]:
        fence = line.lstrip().startswith("```")
        plain = not (fenced or fence) and line.strip()
        if plain and _ITEM.match(line):
            wrap()
            block.append(line)
        elif plain and not line.startswith((">", "|")) and (line[0] != " " or (block and _ITEM.match(block[0]))):
            block.append(line.strip())
        else:
            wrap()
            lines.append(line.rstrip())
        fenced ^= fence
    return lines[:-1]


def blanked(course: Course, file: str, exercises: Iterable[Exercise]) -> str:
    """The text of `file` without the answers to these exercises: the question stands above the first piece, and an
    error that names the exercise in each body."""
    text = (course.root / file).read_text(encoding="utf-8")
    regions = find_regions(text, file)
    pieces: list[tuple[int, int, list[str]]] = []
    for exercise in exercises:
        above = regions[exercise.region][0]
        pieces.append((above.first + 1, above.first + 1, exercise.asked(above.indent)))
        for body in exercise.bodies(text):
            stays = [f"{body.indent}yield"] if body.is_async_generator else []  # else it would be a coroutine
            pieces.append((body.first, body.last, [body.indent + exercise.error, *stays]))
    return replace_lines(text, pieces)


def answer_lines(root: Path, exercise: Exercise) -> int:
    """The number of lines of code in the answer: the reference's, or that of another root."""
    text = (root / exercise.file).read_text(encoding="utf-8")
    return sum(len(body.code(text.split("\n"))) for body in exercise.bodies(text))


def load(course: Course, phase: Phase) -> tuple[Exercise, ...]:
    """The exercises of a phase, each validated; none if there is no file."""
    path = course.exercises_file(phase)
    if not path.is_file():
        return ()
    where = course.name(path)
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise CourseError(f"{where}: {error}") from None
    if set(document) != {"exercise"} or not isinstance(document["exercise"], list):
        raise CourseError(f"{where}: only [[exercise]] tables are allowed, found: {', '.join(document) or 'nothing'}")
    exercises: list[Exercise] = []
    for number, table in enumerate(document["exercise"], 1):
        exercise = _parse(table, f"{where}: exercise {table.get('id', f'number {number}')}")
        try:
            _validate(course, phase, exercise, exercises)
        except CourseError as error:
            raise CourseError(f"{where}: exercise {exercise.id}: {error}") from None
        exercises.append(exercise)
    return tuple(exercises)


def _parse(table: dict[str, Any], where: str) -> Exercise:
    wrong = ", ".join(sorted((table.keys() ^ _FIELDS.keys()) - {"large"}))
    if wrong:
        raise CourseError(f"{where}: the fields are {', '.join(_FIELDS)}; missing or unknown: {wrong}")
    for name, kind in _FIELDS.items():
        items = table[name] if kind is list else [table[name]]
        if not (isinstance(items, list) and items and all(isinstance(each, str) and each.strip() for each in items)):
            raise CourseError(f"{where}: {name} must be {'one or more texts' if kind is list else 'a text'}")
    if table.get("large", True) is not True:
        raise CourseError(f"{where}: large is true, or absent")
    hints = tuple(" ".join(hint.split()) for hint in table["hints"])  # one line: the terminal wraps it
    return Exercise(**table | {"hints": hints, "tests": tuple(table["tests"])})


def _validate(course: Course, phase: Phase, exercise: Exercise, earlier: Iterable[Exercise]) -> None:
    if not re.fullmatch(rf"{phase.number}\.\d+", exercise.id):
        raise CourseError(f"the id of an exercise of this file is {phase.number}.M")
    if any(exercise.id == other.id for other in earlier):
        raise CourseError("the id is used twice")
    if not exercise.file.startswith(f"{phase.package}/") or not (course.root / exercise.file).is_file():
        raise CourseError(f"there is no file '{exercise.file}' in {phase.package}/")
    for test in exercise.tests:
        if not (course.root / test.partition("::")[0]).is_file():
            raise CourseError(f"there is no test file '{test.partition('::')[0]}'")
    text = (course.root / exercise.file).read_text(encoding="utf-8")
    regions = find_regions(text, exercise.file)
    if exercise.region not in regions:
        raise CourseError(f"{exercise.file} has no `# region {exercise.region}`")
    for piece in regions[exercise.region]:
        for other in (each for pieces in regions.values() for each in pieces if each.name.startswith("exercise ")):
            if piece.first < other.first < piece.last:
                raise CourseError(f"{exercise.file}: {other.name} is inside {exercise.region}")
        if not bodies(text, [piece]):
            raise CourseError(f"{exercise.file}:{piece.first + 1}: the region has no function with a body to write")
    try:
        compile(blanked(course, exercise.file, [exercise]), exercise.file, "exec")
    except SyntaxError as error:
        raise CourseError(
            f"{exercise.file} does not compile once it is blank: line {error.lineno}: {error.msg}"
        ) from None


def need(course: Course, phase: Phase) -> tuple[Exercise, ...]:
    """Like `load`, but a phase without exercises is an error."""
    exercises = load(course, phase)
    if not exercises:
        having = ", ".join(str(other.number) for other in course.phases() if course.exercises_file(other).is_file())
        raise CourseError(f"phase {phase.number} has no exercises; phases that have some: {having or 'none'}")
    return exercises


def find(course: Course, id: str) -> Exercise:
    """The exercise with this id, or an error that lists the ids of its phase."""
    everything = [exercise for phase in course.phases() for exercise in load(course, phase)]
    for exercise in everything:
        if exercise.id == id:
            return exercise
    near = [exercise.id for exercise in everything if exercise.id.startswith(f"{id.partition('.')[0]}.")]
    known = ", ".join(near or [exercise.id for exercise in everything]) or "none"
    raise CourseError(f"there is no exercise {id}; the exercises are: {known}")

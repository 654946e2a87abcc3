"""What a sentence says of where code is: "`commit` is exercise 5.1", "`EngineCore.step` (chapter 0)"."""

import ast
import re
from collections.abc import Iterator
from functools import cache

from chapters.course import Course, CourseError
from chapters.exercises import Exercise
from chapters.source import definitions, locate

SENTENCE = re.compile(r"(?<=[.:?!])\s+(?=[A-Z`*])")
CODE = re.compile(r"`([A-Za-z_][\w.]*)(?:\([^`]*\))?`")
IS_EXERCISE = re.compile(r"(?:\b(?:is|are)\s+|\()\**exercise\**\s+\**(\d+\.\d+)")
BACK = re.compile(r"(?:This|That|It|Both|All of (?:this|it))\s")  # such a sentence speaks of the one before
IN_CHAPTER = re.compile(rf"{CODE.pattern}\s+\(\[?chapter\s+(\d+)")
PHASES = 7  # chapters 0 to 6 are about the phase of their number
Place = tuple[str, int, int]  # a file and lines of it


def misattributed(course: Course, text: str, exercises: dict[str, Exercise]) -> Iterator[str]:
    """What a text says wrongly of the exercise or the chapter in which code is."""
    blocks = re.split(r"\n\s*\n", text)
    for block, follows in zip(blocks, [*blocks[1:], ""], strict=True):
        if block.startswith(("```", "|", "<")):
            continue
        yield from _of_sentences(course, SENTENCE.split(" ".join(block.split())), exercises)
        shown = re.match(r"<!-- weave: (\S+) signature", follows)
        named = re.findall(r"(?:[Ee]xercise\**\s+|\*)\**(\d{1,2}\.\d{1,2})\b", SENTENCE.split(block)[-1])
        if shown and block.endswith(":") and named:
            yield from _of_listing(course, shown[1], named, exercises)


def _of_sentences(course: Course, sentences: list[str], exercises: dict[str, Exercise]) -> Iterator[str]:
    for before, sentence in zip(["", *sentences], sentences, strict=False):
        for match in IS_EXERCISE.finditer(sentence):
            names = CODE.findall(sentence[: match.start()].rpartition("; ")[2])
            if not names and BACK.match(sentence):
                names = CODE.findall(before)
            known = {name: its for name in names if (its := _defined(course).get(name))}
            functions = [name for name in known if not name.rpartition(".")[2][:1].isupper()]
            exercise = exercises.get(match[1])
            if (
                exercise
                and functions
                and not any(_overlaps(course, exercise, p) for its in known.values() for p in its)
            ):
                yield f"`{'`, `'.join(functions)}` is not in exercise {match[1]}"
        for name, chapter in IN_CHAPTER.findall(sentence):
            phases = {int(file[len("phase")]) for file, _, _ in _defined(course).get(name, ())}
            if phases and int(chapter) < PHASES and int(chapter) not in phases:
                yield f"`{name}` is not in the phase of chapter {chapter} but in {', '.join(map(str, sorted(phases)))}"


def _of_listing(course: Course, anchor: str, ids: list[str], exercises: dict[str, Exercise]) -> Iterator[str]:
    """A paragraph that names exercises and ends in a colon is about one whose code the listing shows."""
    file = anchor.partition("#")[0]
    try:
        places = [(file, first, last) for first, last in locate(course.root, anchor)[1]]
    except CourseError:
        return  # weave says so
    known = [exercises[id] for id in ids if id in exercises]
    if known and not any(_overlaps(course, exercise, place) for exercise in known for place in places):
        yield f"'{anchor}' shows nothing of exercise {', '.join(ids)}"


def _overlaps(course: Course, exercise: Exercise, place: Place) -> bool:
    file, first, last = place
    return exercise.file == file and any(first < end and start < last for start, end in _lines(course, exercise))


@cache
def _lines(course: Course, exercise: Exercise) -> list[tuple[int, int]]:
    text = (course.root / exercise.file).read_text("utf-8")
    return [(body.first, body.last) for body in exercise.bodies(text)]


@cache
def _defined(course: Course) -> dict[str, list[Place]]:
    """Where each function, class and method of the phases is, by its name and by its qualified name."""
    found: dict[str, list[Place]] = {}
    for path in course.sources():
        for name, first, last in definitions(ast.parse(path.read_text("utf-8"))):
            for known in {name, name.rpartition(".")[2]}:
                found.setdefault(known, []).append((course.name(path), first - 1, last))
    return found

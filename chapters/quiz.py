"""Quick questions of a chapter: several choices, or a number that an expression over the project's code can prove."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from chapters.course import Course


@dataclass(frozen=True)
class Choice:
    """A possible answer, and why it is right or wrong."""

    text: str
    why: str
    right: bool = False


@dataclass(frozen=True)
class Question:
    """A question with choices, or one with a number. A number is right within `tolerance` of itself, a share."""

    text: str
    choices: tuple[Choice, ...] = ()
    number: float | None = None
    unit: str = ""
    why: str = ""
    tolerance: float = 0.0
    check: str = ""  # proves the number: an expression, after an import and a semicolon if it needs names

    @property
    def lettered(self) -> list[tuple[str, Choice]]:
        return list(zip("abcd", self.choices, strict=False))

    @property
    def offered(self) -> list[str]:
        """The choices, or what kind of answer is expected."""
        if self.number is not None:
            return [f"(a number{f', in {self.unit}' if self.unit else ''})"]
        return [f"{letter}) {choice.text}" for letter, choice in self.lettered]

    def explained(self, given: str = "") -> list[str]:
        """The right answer and why; the other choices, or only the one that was given, and why not."""
        if self.number is not None:
            return [f"{self.number:g} {self.unit}".rstrip() + f". {self.why}"]
        return [
            f"{letter}) {'right' if choice.right else 'no'}: {choice.why}"
            for letter, choice in self.lettered
            if choice.right or not given or letter == given.lower()
        ]

    def is_right(self, given: str) -> bool:
        if self.number is None:
            return any(choice.right and letter == given.lower() for letter, choice in self.lettered)
        value = _number(given)
        return value is not None and abs(value - self.number) <= self.tolerance * abs(self.number)

    def answer(self, ask: Callable[[str], str]) -> str:
        """Ask until there is an answer, right or wrong: an empty line or another word costs nothing. The end of the
        input is an interrupt."""
        letters = [letter for letter, _ in self.lettered]
        expected = f"{', '.join(letters[:-1])} or {letters[-1]}" if letters else "a number"
        try:
            given = ask("> ").strip()
            while given.lower() not in letters if letters else _number(given) is None:
                given = ask(f"{expected}; Ctrl-D ends > ").strip()
        except EOFError:
            raise KeyboardInterrupt from None
        return given


def _number(given: str) -> float | None:
    try:
        return float(given.replace(",", "").split()[0])
    except (ValueError, IndexError):
        return None


def load(course: Course, chapter: int) -> tuple[Question, ...]:
    questions = course.tables(chapter, "quiz", "question", _parse)
    if not questions:
        raise course.has_none(chapter, "quiz", "questions")
    return questions


def _parse(table: dict[str, Any]) -> Question:
    choices = [Choice(**choice) for choice in table.pop("choice", ())]
    random.Random(table["text"]).shuffle(choices)  # the files give the right one first
    question = Question(choices=tuple(choices), **table)
    if (question.number is None) != (sum(choice.right for choice in choices) == 1):
        raise ValueError(f"a question has a number, or choices of which one is right: {question.text}")
    return question

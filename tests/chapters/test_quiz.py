"""The quiz: every question has one right answer and explains all of them, and numbers are those of the code."""

from pathlib import Path

import pytest
from rich.console import Console

from chapters import quiz
from chapters.cli import main
from chapters.course import Course

COURSE = Course.here()


@pytest.mark.parametrize("chapter", [*range(10), 11, 12])
def test_a_chapter_has_five_questions_with_explained_answers_and_provable_numbers(chapter: int) -> None:
    questions = quiz.load(COURSE, chapter)
    assert len(questions) == (10 if chapter == 2 else 5), "five for a sitting; chapter 2 has two that ask"
    for question in questions:
        assert all(choice.why for choice in question.choices), question.text
        assert question.choices or question.why, question.text
        assert question.number is not None or len(question.choices) >= 3, question.text
        if question.number is not None:
            names: dict[str, object] = {}
            given, _, expression = question.check.rpartition("; ")
            exec(given, names)
            proved = eval(expression, names)
            assert question.is_right(str(proved)), f"{question.text} {proved}"


def test_a_number_is_right_with_its_unit_and_within_its_tolerance() -> None:
    question = quiz.Question("How long?", number=1000, unit="ms", why="so", tolerance=0.01)
    assert list(map(question.is_right, ("1,000 ms", "1005", "1020", "", "ms"))) == [True, True, False, False, False]


def test_in_a_terminal_it_asks_and_stores_the_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "chapters").mkdir()
    for name in ("pyproject.toml", "chapters/00_quiz.toml"):
        (tmp_path / name).write_bytes((COURSE.root / name).read_bytes())
    (tmp_path / "tests").mkdir()
    course = Course(tmp_path)
    questions = quiz.load(course, 0)
    right = [
        str(one.number) if one.number is not None else next(letter for letter, choice in one.lettered if choice.right)
        for one in questions
    ]
    last = questions[4]
    wrong = "-1" if last.number is not None else next(letter for letter, choice in last.lettered if not choice.right)
    given = iter([*right[:4], wrong])
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr(Console, "input", lambda *_: next(given))
    assert main(["quiz", "0"], course) == 0
    assert '"result": "4/5"' in (tmp_path / ".course/state.json").read_text(encoding="utf-8")

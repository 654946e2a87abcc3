"""Definitions of exercises, blanks, and errors."""

from collections.abc import Callable
from typing import Any

import pytest

from chapters.course import Course, CourseError, Phase
from chapters.exercises import Exercise, answer_lines, blanked, load
from chapters.source import find_regions, replace_regions
from chapters.workspace import by_file

Edit = Callable[[str, str, str], None]


def test_the_miniature_course_loads(course: Course) -> None:
    assert [(each.id, each.phase, each.title) for each in load(course, course.phase(0))] == [
        ("0.1", 0, "Push"),
        ("0.2", 0, "Pop"),
        ("0.3", 0, "Clamp"),
    ]
    assert load(course, course.phase(1)) == ()


def test_a_blank_has_the_question_and_an_error_that_names_the_exercise(course: Course) -> None:
    first = load(course, course.phase(0))[0]
    text = blanked(course, first.file, [first])
    assert (
        "        # region exercise 0.1\n"
        "        # Put the item last.\n"
        "        #\n"
        "        # - not first\n"
        '        raise NotImplementedError("exercise 0.1: Push")\n'
        "        # endregion\n"
    ) in text
    reference = (course.root / first.file).read_text()
    assert text.split("    # region pop")[1] == reference.split("    # region pop")[1]


def test_paragraphs_wrap_and_code_does_not() -> None:
    question = f"{'word ' * 40}\n\n```python\n{'x' * 120}\n\nplain\n```"
    lines = Exercise("0.1", "T", "f.py", question, ("h",), ("t",)).asked("    ")
    assert all(len(line) <= 100 for line in lines[:3])
    assert lines.count("    # " + "x" * 120) == 1
    assert lines[-3:] == ["    #", "    # plain", "    # ```"]


def test_items_of_a_list_wrap_with_a_hanging_indent() -> None:
    question = f"Two:\n- {'word ' * 30}end\n  more\n- second\n1. {'word ' * 30}"
    lines = Exercise("0.1", "T", "f.py", question, ("h",), ("t",)).asked("    ")
    starts = ["    # Two:", "    # - word", "    #   word", "    # - second", "    # 1. word", "    #    wor"]
    assert [line[: len(start)] for line, start in zip(lines, starts, strict=True)] == starts
    assert lines[2].endswith("word end more")
    assert max(map(len, lines)) <= 100


SKELETON = '''\
class Stack:
    # region exercise 0.3
    # A stack that yields what it holds.
    limit = 3

    @property
    def size(self) -> int:
        """How many."""
        raise NotImplementedError("exercise 0.3: Clamp")

    def missing(self) -> None: ...

    # endregion

    def given(self) -> int:
        return 1

    # region exercise 0.3
    async def drain(self):
        raise NotImplementedError("exercise 0.3: Clamp")
        yield

    # endregion
'''


def test_whole_functions_keep_decorators_signatures_and_docstrings(course: Course, edit: Edit) -> None:
    written = SKELETON.replace("    # A stack that yields what it holds.\n", "")
    size = "# A comment.\n        def inner():\n            return 3\n\n        return inner()"
    drain = "while True:\n            yield 1"
    error = 'raise NotImplementedError("exercise 0.3: Clamp")'
    written = written.replace(error, size, 1).replace(f"{error}\n        yield", drain)
    (course.root / "phase0_request/limits.py").write_text(written)
    edit("chapters/00_exercises.toml", "No more than `top`.", "A stack that yields what it holds.")
    exercise = load(course, course.phase(0))[2]
    assert blanked(course, exercise.file, [exercise]) == SKELETON
    assert answer_lines(course.root, exercise) == 5


@pytest.mark.parametrize(
    ("old", "new", "left"),
    [
        ("", "", (["size", "drain"], True)),
        ("Clamp", "an older title", (["size", "drain"], True)),
        ('raise NotImplementedError("exercise 0.3: Clamp")\n\n', "return 1\n\n", (["drain"], False)),
        ("    async def", "    def helper(self):\n        return 1\n\n    async def", (["size", "drain"], False)),
        ("0.3: Clamp", "0.30: Clamp", ([], False)),
    ],
)
def test_a_skeleton_is_untouched_partly_written_or_written(old: str, new: str, left: tuple[list[str], bool]) -> None:
    exercise = Exercise("0.3", "Clamp", "f.py", "q", ("h",), ("t",))
    assert exercise.unwritten(SKELETON.replace(old, new)) == left


@pytest.mark.parametrize(
    ("body", "left"),
    [
        ('raise NotImplementedError("exercise 0.1: T")', (["f"], True)),
        ('# thoughts\n\n    raise NotImplementedError("exercise 0.1: an older title")', (["f"], True)),
        ('x = 1\n    raise NotImplementedError("exercise 0.1: T")', (["f"], False)),
        ('raise NotImplementedError("exercise 0.10: T")', ([], False)),
        ("", ([], False)),
    ],
)
def test_only_an_untouched_part_of_a_function_is_blank(body: str, left: tuple[list[str], bool]) -> None:
    text = f"def f():\n    # region exercise 0.1\n    {body}\n    # endregion\n    return 1\n"
    assert Exercise("0.1", "T", "f.py", "q", ("h",), ("t",)).unwritten(text) == left


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('id = "0.2"', 'id = "0.1"', "exercise 0.1: the id is used twice"),
        ('id = "0.2"', 'id = "1.2"', "exercise 1.2: the id of an exercise of this file is 0.M"),
        ('id = "0.2"', 'id = "0.7"', "exercise 0.7: phase0_request/queue.py has no `# region exercise 0.7`"),
        ('hints = ["`min`"]', "hints = []", "exercise 0.3: hints must be one or more texts"),
        ('hints = ["`min`"]', 'hints = "`min`"', "exercise 0.3: hints must be one or more texts"),
        ('hints = ["`min`"]', "", "exercise 0.3: the fields are id, title"),
        ('title = "Pop"', 'title = "Pop"\nlevel = 3', "missing or unknown: level"),
        ('title = "Pop"', 'title = "Pop"\nlarge = 1', "exercise 0.2: large is true, or absent"),
        ('title = "Pop"', 'title = " "', "exercise 0.2: title must be a text"),
        (
            '"tests/phase0_request/test_limits.py"',
            '"tests/no.py::x"',
            "exercise 0.3: there is no test file 'tests/no.py'",
        ),
        (
            '"phase0_request/limits.py"',
            '"phase0_request/no.py"',
            "exercise 0.3: there is no file 'phase0_request/no.py'",
        ),
        ('"phase0_request/limits.py"', '"phase1_pool/__init__.py"', "exercise 0.3: there is no file 'phase1_pool"),
        ("[[exercise]]", "[exercise]", "00_exercises.toml: "),
        ("[[exercise]]", "[[exercises]]", "only [[exercise]] tables are allowed, found: exercises"),
    ],
)
def test_a_wrong_definition_names_the_exercise(course: Course, edit: Edit, old: str, new: str, message: str) -> None:
    edit("chapters/00_exercises.toml", old, new)
    with pytest.raises(CourseError) as error:
        load(course, course.phase(0))
    assert str(error.value).startswith("chapters/00_exercises.toml")
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("    # endregion\n", "", "exercise 0.3: phase0_request/limits.py:2: region 'exercise 0.3' is never closed"),
        (
            "    # endregion\n",
            "    # endregion\n\n\n# region exercise 0.3\nTOP = 3\n# endregion\n",
            "exercise 0.3: phase0_request/limits.py:7: the region has no function with a body to write",
        ),
        (
            "    # region exercise 0.3\n    return min(value, top)\n",
            "    return (\n    # region exercise 0.3\n    min(value, top)\n    )\n",
            "exercise 0.3: phase0_request/limits.py does not compile once it is blank: line ",
        ),
        (
            "    return min(value, top)\n",
            "    # region exercise 0.4\n    return min(value, top)\n    # endregion\n",
            "exercise 0.4 is inside exercise 0.3",
        ),
    ],
)
def test_a_region_that_cannot_be_blanked_is_refused(
    course: Course, edit: Edit, old: str, new: str, message: str
) -> None:
    edit("phase0_request/limits.py", old, new)
    with pytest.raises(CourseError) as error:
        load(course, course.phase(0))
    assert message in str(error.value)


@pytest.mark.parametrize("phase", Course.here().phases(), ids=lambda phase: phase.package)
def test_blanks_of_a_phase_filled_with_the_reference_are_the_reference(phase: Phase) -> None:
    """Which is also the proof that the exercises of a file do not overlap."""
    course = Course.here()
    for file, its in by_file(load(course, phase)).items():
        text = (course.root / file).read_text()
        blank = blanked(course, file, its)
        assert all(each.unwritten(blank)[1] for each in its)
        regions, lines = find_regions(text, file), text.split("\n")
        answers = {each.region: [piece.body(lines) for piece in regions[each.region]] for each in its}
        assert replace_regions(blank, file, answers) == text


def test_exercises_lists_them_all(tool: Callable[..., Any]) -> None:
    said = tool("exercises")
    assert said.code == 0
    assert all(text in said.out for text in ("0.1", "Push", "phase0_request/queue.py", "0.3"))
    assert "3 exercises; the reference's answers have 3 lines of code." in said.out

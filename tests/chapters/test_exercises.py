"""Definitions of exercises and blanks, and those of the book: exercises, bugs, questions."""

import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable

import pytest

from chapters import bugs
from chapters.course import Course, CourseError
from chapters.exercises import answer_lines, blanked, every, load
from chapters.source import find_regions, replace_regions
from chapters.workspace import by_file

Edit = Callable[[str, str, str], None]
COURSE = Course.here()


def test_a_blank_has_the_question_and_an_error_that_names_the_exercise(course: Course) -> None:
    first = load(course, 0)[0]
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
    exercise = load(course, 0)[2]
    assert blanked(course, exercise.file, [exercise]) == SKELETON
    assert answer_lines(course.root, exercise) == 5
    assert exercise.is_blank(SKELETON)
    assert not exercise.is_blank(SKELETON.replace("        yield\n", "        yield 1\n"))
    assert not exercise.is_blank(written)


@pytest.mark.parametrize(
    ("file", "old", "new", "message"),
    [
        ("chapters/00_exercises.toml", 'id = "0.2"', 'id = "0.7"', "phase0_request/queue.py has no `# region exercise"),
        ("chapters/00_exercises.toml", 'hints = ["`min`"]', "", "'hints'"),
        ("chapters/00_exercises.toml", 'title = "Pop"', 'title = "Pop"\nlevel = 3', "unexpected keyword argument"),
        ("chapters/00_exercises.toml", "phase0_request/limits.py", "phase0_request/no.py", "No such file"),
        ("chapters/00_exercises.toml", "[[exercise]]", "[exercise", "00_exercises.toml: "),
        ("phase0_request/limits.py", "    # endregion\n", "", "limits.py:2: region 'exercise 0.3' is never closed"),
    ],
)
def test_a_wrong_definition_is_an_error(
    course: Course, edit: Edit, file: str, old: str, new: str, message: str
) -> None:
    edit(file, old, new)
    with pytest.raises(CourseError, match=r"^chapters/00_exercises\.toml") as error:
        load(course, 0)
    assert message in str(error.value)


TRACED = """
import json, sys, threading

bodies, ran = json.loads(sys.argv[1]), set()

def watch(frame, event, _):
    if frame.f_code.co_filename not in bodies:
        return None
    def line(frame, event, _):
        ran.update(id for first, last, id in bodies[frame.f_code.co_filename] if first < frame.f_lineno <= last)
        return line
    return line(frame, event, None)

sys.settrace(watch)
threading.settrace(watch)
from phase0_request.params import SamplingParams
from phase6_integration.engine.engine import NanoServingEngine
with NanoServingEngine.from_pretrained(device="cpu") as engine:
    engine.generate(["a", "b"], SamplingParams(max_tokens=2, temperature=0.7, top_p=0.9), progress=False)
sys.settrace(None)
print(json.dumps(sorted(ran)))
"""


def test_a_server_on_a_cpu_runs_no_exercise_that_is_said_to_run_elsewhere() -> None:
    its = every(COURSE)
    bodies: dict[str, list[tuple[int, int, str]]] = {}
    for exercise in its:
        found = exercise.bodies((COURSE.root / exercise.file).read_text())
        bodies.setdefault(str(COURSE.root / exercise.file), []).extend((b.first, b.last, exercise.id) for b in found)
    command = [sys.executable, "-c", TRACED, json.dumps(bodies)]
    done = subprocess.run(command, cwd=COURSE.root, capture_output=True, text=True, timeout=120, check=True)
    ran = set(json.loads(done.stdout))
    assert len(ran) > 20
    assert [each.id for each in its if each.id in ran and each.runs in ("gpu", "tests")] == []
    triton = [each for each in its if "/kernels/triton/" in each.file]
    assert {each.runs for each in triton} <= {"gpu", "tests"}
    assert {each.runs for each in its if "/lab/" in each.file} == {"tests"}


def test_exercises_carry_the_number_of_their_chapter() -> None:
    for chapter in COURSE.chapters_with("exercises"):
        ids = [each.id.split(".") for each in load(COURSE, chapter)]
        assert {first for first, _ in ids} == {str(chapter)}
        numbers = [int(number) for _, number in ids]
        assert numbers == list(range(1, len(ids) + 1)), f"chapter {chapter}: {numbers}"


def test_the_path_of_part_one_is_about_twenty_exercises_and_some_of_each_chapter() -> None:
    core = Counter(each.chapter for each in every(COURSE) if each.core)
    assert sorted(core) == [0, 1, 2, 3, 4, 5, 6]
    puzzles = sum(each.core and "/primer/" in each.file for each in every(COURSE))  # four of them are one exercise
    assert 18 <= core.total() - puzzles + puzzles // 4 <= 30


def test_a_question_has_at_most_80_words_without_its_example() -> None:
    words = {each.id: len(re.sub(r"^ {4}.*$", "", each.question, flags=re.MULTILINE).split()) for each in every(COURSE)}
    assert {id: count for id, count in words.items() if count > 80} == {}


def test_blanks_filled_with_the_reference_are_the_reference() -> None:
    """Which is also the proof that the exercises of a file do not overlap, and that blanks compile."""
    its = every(COURSE)
    for file, here in by_file(its).items():
        text = (COURSE.root / file).read_text()
        blank = blanked(COURSE, file, here)
        compile(blank, file, "exec")
        assert all(each.is_blank(blank) for each in here)
        regions, lines = find_regions(text, file), text.split("\n")
        answers = {each.region: [piece.body(lines) for piece in regions[each.region]] for each in here}
        assert replace_regions(blank, file, answers) == text


def test_the_edits_of_bugs_find_their_lines_and_compile() -> None:
    for chapter in COURSE.chapters_with("bugs"):
        its = bugs.load(COURSE, chapter)
        assert [bug.id for bug in its] == [f"{chapter}{letter}" for letter in "abcdefghijklm"[: len(its)]]
    for bug in bugs.every(COURSE):
        compile(bug.planted((COURSE.root / bug.file).read_text(encoding="utf-8")), bug.file, "exec")
        compile(bug.repro, f"bug {bug.id}", "exec")
        assert bug.title not in bug.symptom


def test_the_tests_that_exercises_and_bugs_name_are_in_files_that_exist() -> None:
    its = (*every(COURSE), *bugs.every(COURSE))
    files = {test.partition("::")[0] for each in its for test in each.tests}
    assert [file for file in files if not (COURSE.root / file).is_file()] == []

"""Commands and exercises in the prose: what is wrong with them, and that those of the book are right."""

from pathlib import Path
from typing import NamedTuple

import pytest

from chapters import exercises, prose
from chapters.course import Course
from chapters.source import locate

COURSE = Course.here()


class PlacedPage(NamedTuple):
    name: str
    path: Path


TEXTS = [
    *(COURSE.root / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")),
    *sorted(COURSE.chapters.glob("*.md")),
    *sorted(COURSE.chapters.glob("*.toml")),
    *COURSE.notebooks(),
]


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("`python -m chapters begin 0`", "invalid choice: 'begin'"),
        ("`hint 9.9`", "there is no exercise 9.9"),
        ("`break 0z`", "there is no bug 0z"),
        ("`quiz 13`", "there is no quiz 13"),
        ("`python -m chapters check --fast`", "unrecognized arguments: --fast"),
        ("`nanoserve begin`", "the commands are serve, "),
        ("`python -m phase9_x`", "there is no program phase9_x"),
        ("`python -m phase4_radix --chunk 3`", "unrecognized arguments: --chunk 3"),
        ("`python -m phase1_kv_pool.lab fragments`", "there is no 'fragments' here; it has "),
        ("`python -m phase1_kv_pool.lab fragmentation --slot 3 --pages`", "unrecognized arguments: --pages"),
        ("As chapter 13 says.", "there is no chapter 13"),
        ("In chapters 9 to 14.", "there is no chapter 14"),
        ("```bash\nnanoserve serve --fast  # so\n```", "serve has no flag --fast"),
        ("```bash\nmake install && make fast\n```", "the Makefile has no fast"),
        ("It is **exercise 0.9**.", "there is no exercise 0.9"),
        ("Planted bug\n0z shows it.", "there is no bug 0z"),
        ("## Exercises\n\n0.1 and 2.99.\n", "there is no exercise 2.99"),
        (
            "## Exercises\n\n| 5.1 | Commit | `scheduler.py`, `Scheduler.commit` |\n",
            "`Scheduler.commit` is not in exercise 5.1",
        ),
        (
            "## Exercises\n\n| 5.1 | Plan | `queue.py` |\n",
            "exercise 5.1 is in phase5_continuous/scheduler.py, not in queue.py",
        ),
    ],
)
def test_what_a_reader_cannot_type_or_find_is_a_fault(tmp_path: Path, text: str, fault: str) -> None:
    (found,) = faults(tmp_path, text)
    assert fault in found


# Sentences that the book once had. `SCHEDULER` is the exercise that writes `Scheduler.plan`.
FALSE = (
    ("A learner begins with `python -m chapters begin 5.7`.", "invalid choice: 'begin'"),
    (
        "## Exercises\n\n| SCHEDULER | Plan and commit: a token that comes too late is discarded | phase 5, "
        "`scheduler.py`, `Scheduler.commit` |",
        "`Scheduler.commit` is not in exercise SCHEDULER",
    ),
    (
        "A step may also raise. Then none of its tokens are committed, and `discard_in_flight` counts every request "
        "again from what is\ncommitted. This is exercise SCHEDULER.",
        "`discard_in_flight` is not in exercise SCHEDULER",
    ),
    (
        "the packed step lists the rows of those that do, and `commit` (chapter 2) asks the same\nquestion.",
        "`commit` is not in the phase of chapter 2 but in 0",
    ),
    (
        "`EngineCore.step` (chapter 5) launches until one step more than `ahead` is in flight, then completes the "
        "oldest.",
        "`EngineCore.step` is not in the phase of chapter 5 but in 0",
    ),
)


@pytest.mark.parametrize(("text", "fault"), FALSE)
def test_a_false_statement_about_where_code_is_is_a_fault(tmp_path: Path, text: str, fault: str) -> None:
    file = "phase5_continuous/scheduler.py"
    places = locate(COURSE.root, f"{file}#Scheduler.plan")[1]
    writes = [
        each.id
        for each in exercises.every(COURSE)
        for body in each.bodies((COURSE.root / file).read_text())
        if each.file == file and any(first < body.last and body.first < last for first, last in places)
    ]
    (found,) = faults(tmp_path, text.replace("SCHEDULER", writes[0]))
    assert fault.replace("SCHEDULER", writes[0]) in found


def test_a_true_statement_is_none(tmp_path: Path) -> None:
    text = (
        "`commit` (chapter 0) and `step` (chapter 5) do. There is no chapter 13. **Exercise 0.3** is the request:\n\n"
    )
    shown = "<!-- weave: phase0_request/request.py#Request signature -->"
    assert faults(tmp_path, text + shown) == []
    (found,) = faults(tmp_path, text + shown.replace("request.py#Request", "queue.py#RequestQueue"))
    assert found.endswith("shows nothing of exercise 0.3")


@pytest.mark.parametrize(
    "text",
    [
        "`python -m phase1_kv_pool --page-size 64`, `python -m phase1_kv_pool.lab`, `python -m phase4_radix.lab study`",
        "`python -m chapters check N.M`, `break N`, `check 0`, `solution 0.1`, `python -m chapters mine --port 1`",
        "`nanoserve bench ladder --mine`, `nanoserve --version`, `make test`, `make lint types`, `make pins`",
        "```bash\nmake install && source .venv/bin/activate\nnanoserve serve --port 1  # `nanoserve begin`\n```",
        "```python\nnanoserve(begin)\n```\n0.9 seconds. ## Exercises\n",
        "## Exercises\n\n| 5.1 | Plan | phase 5, `scheduler.py`, `Scheduler.plan` to `_schedule` |\n",
    ],
)
def test_what_a_reader_can_type_is_none(tmp_path: Path, text: str) -> None:
    assert faults(tmp_path, text) == []


def faults(folder: Path, text: str) -> list[str]:
    """What is wrong with a text of this course."""
    (folder / "text.md").write_text(text)
    return prose.unknown(COURSE, folder / "text.md")


@pytest.mark.parametrize("text", TEXTS, ids=lambda path: path.name)
def test_the_commands_and_exercises_that_the_prose_names_are_there(text: Path) -> None:
    assert prose.unknown(COURSE, text) == []


@pytest.mark.parametrize("chapter", COURSE.chapters_with("exercises"))
def test_the_number_of_an_exercise_is_its_place_in_the_text(chapter: int) -> None:
    assert prose.order(COURSE, chapter) == [each.id for each in exercises.load(COURSE, chapter)]


def test_an_exercise_is_where_the_text_first_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = {
        "first": "Exercise 3.4 is core.\n\n## A\n\n```\nexercise 3.4\n```\n\n3.2 s. **Exercise 3.3** and **3.1** are.",
        "second": "\n## B\n\nThat was exercise 3.1.\n\n| 3.2 | c |\n",
    }
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(prose, "PAGES", [PlacedPage(f"03_{name}", tmp_path / name) for name in texts])
    assert prose.order(COURSE, 3) == ["3.3", "3.1", "3.2"]

"""Commands and exercises in the prose: what is wrong with them, and that those of the book are right."""

from pathlib import Path

import pytest

from chapters import prose
from chapters.course import Course

COURSE = Course.here()
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
        ("`quiz 10`", "there is no quiz 10"),
        ("`python -m chapters check --fast`", "unrecognized arguments: --fast"),
        ("`nanoserve begin`", "the commands are serve, "),
        ("```bash\nnanoserve serve --fast  # so\n```", "serve has no flag --fast"),
        ("```bash\nmake install && make fast\n```", "the Makefile has no fast"),
        ("It is **exercise 0.9**.", "there is no exercise 0.9"),
        ("Planted bug\n0z shows it.", "there is no bug 0z"),
        ("## Exercises\n\n0.1 and 2.99.\n", "there is no exercise 2.99"),
        (
            "## Exercises\n\n| 5.4 | Commit | `scheduler.py`, `Scheduler.commit` |\n",
            "`Scheduler.commit` is not in exercise 5.4",
        ),
        (
            "## Exercises\n\n| 5.4 | Plan | `queue.py` |\n",
            "exercise 5.4 is in phase5_continuous/scheduler.py, not in queue.py",
        ),
    ],
)
def test_what_a_reader_cannot_type_or_find_is_a_fault(tmp_path: Path, text: str, fault: str) -> None:
    (found,) = faults(tmp_path, text)
    assert fault in found


@pytest.mark.parametrize(
    "text",
    [
        "`python -m chapters check N.M`, `break N`, `check 0`, `solution 0.1`, `python -m chapters mine --port 1`",
        "`nanoserve bench ladder --mine`, `nanoserve --version`, `make test`, `make lint types`, `make pins`",
        "```bash\nmake install && source .venv/bin/activate\nnanoserve serve --port 1  # `nanoserve begin`\n```",
        "```python\nnanoserve(begin)\n```\n0.9 seconds. ## Exercises\n",
        "## Exercises\n\n| 5.4 | Plan | phase 5, `scheduler.py`, `Scheduler.plan` to `_fail_first` |\n",
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

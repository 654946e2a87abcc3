"""A miniature course: one phase with three exercises, one without, and a chapter."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from chapters.cli import main
from chapters.course import Course

HOME = Path(__file__).resolve().parents[2]

FILES = {
    "pyproject.toml": """\
[tool.pytest.ini_options]
addopts = "--strict-markers --import-mode=importlib"
filterwarnings = ["error"]
markers = ["proof: shown by doctor", "slow: takes long"]
""",
    "README.md": "# Course\n",
    "phase0_request/__init__.py": """\
def __getattr__(name):
    if name != "Queue":
        raise AttributeError(name)
    from phase0_request.queue import Queue

    return Queue
""",
    "phase0_request/queue.py": '''\
"""A queue."""


class Queue:
    """First in, first out."""

    def __init__(self) -> None:
        self.items: list[int] = []

    def push(self, item: int) -> None:
        # region exercise 0.1
        self.items.append(item)
        # endregion

    # region pop
    def pop(self) -> int:
        # region exercise 0.2
        return self.items.pop(0)
        # endregion
    # endregion
''',
    "phase0_request/limits.py": """\
def clamp(value: int, top: int) -> int:
    # region exercise 0.3
    return min(value, top)
    # endregion
""",
    "phase0_request/__main__.py": """\
import sys

from phase0_request import Queue

queue = Queue()
queue.push(int(sys.argv[sys.argv.index("--item") + 1]))
print(queue.items, flush=True)
sys.exit(queue.pop())
""",
    "phase1_pool/__init__.py": "",
    "tests/phase0_request/test_queue.py": """\
import pytest

from phase0_request import Queue


def test_push():
    queue = Queue()
    queue.push(3)
    assert queue.items == [3]


@pytest.mark.proof
def test_pop():
    queue = Queue()
    queue.items = [1, 2]
    assert queue.pop() == 1
""",
    "tests/phase0_request/test_limits.py": """\
from phase0_request.limits import clamp


def test_clamp():
    assert clamp(5, 3) == 3
""",
    "chapters/00_request.md": "# Request\n\n<!-- weave: phase0_request/queue.py#pop -->\n",
    "chapters/00_exercises.toml": '''\
[[exercise]]
id = "0.1"
title = "Push"
file = "phase0_request/queue.py"
question = """
Put the item last.

- not first
"""
hints = ["A list has a method.", "It is `append`."]
tests = ["tests/phase0_request/test_queue.py::test_push"]

[[exercise]]
id = "0.2"
title = "Pop"
file = "phase0_request/queue.py"
question = "Take the item that came first."
hints = ["`pop` takes an index."]
tests = ["tests/phase0_request/test_queue.py::test_pop"]

[[exercise]]
id = "0.3"
title = "Clamp"
file = "phase0_request/limits.py"
question = "No more than `top`."
hints = ["`min`"]
tests = ["tests/phase0_request/test_limits.py"]
''',
    "chapters/results/host.json": json.dumps(
        {"device": "a CPU", "figures": {"steps": {"us": [0.837, 2]}, "own": {"Queue.pop": 0.5}}}
    ),
}


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """The root of the miniature course."""
    return tmp_path / "course"


@pytest.fixture
def course(place: Path, monkeypatch: pytest.MonkeyPatch) -> Course:
    """The miniature course, with no terminal settings from the environment."""
    for name in ("FORCE_COLOR", "NO_COLOR", "COLUMNS", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    for name, text in FILES.items():
        path = place / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return Course(place)


@pytest.fixture
def standalone(course: Course) -> Course:
    """The same with the tool inside, so that `python -m chapters` runs there as in the real checkout."""
    support = HOME / "phase0_request" / "support"
    for path in [*(HOME / "chapters").rglob("*.py"), support / "__init__.py", support / "entry.py"]:
        copy = course.root / path.relative_to(HOME)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, copy)
    (course.chapters / "preload.py").write_text("")
    return course


@dataclass(frozen=True)
class Said:
    code: int
    out: str
    err: str


@pytest.fixture
def tool(course: Course, capsys: pytest.CaptureFixture[str]) -> Callable[..., Said]:
    """Run one command on the miniature course: `tool("start", "0")`."""

    def run(*argv: str) -> Said:
        capsys.readouterr()
        try:
            code = main(argv, course)
        except SystemExit as exit_:  # argparse ends this way
            code = int(exit_.code or 0)
        said = capsys.readouterr()
        return Said(code, said.out, said.err)

    return run


@pytest.fixture
def edit(course: Course) -> Callable[[str, str, str], None]:
    """Replace `old`, which must be there, by `new` in a file named from the root."""

    def change(name: str, old: str, new: str) -> None:
        path = course.root / name
        text = path.read_text(encoding="utf-8")
        assert old in text
        path.write_text(text.replace(old, new), encoding="utf-8")

    return change


@pytest.fixture
def solve(course: Course) -> Callable[[str, str], None]:
    """Write an answer over the error of an exercise in the workspace: `solve("0.1", "self.items.append(item)")`."""

    def answer(id: str, text: str) -> None:
        error = re.compile(rf'raise NotImplementedError\("exercise {re.escape(id)}: \w+"\)')
        files = {path: path.read_text(encoding="utf-8") for path in course.workspace.rglob("*.py")}
        ((path, blank),) = ((path, blank) for path, blank in files.items() if error.search(blank))
        path.write_text(error.sub(lambda _: text, blank), encoding="utf-8")

    return answer

"""Listings and figures in prose."""

import re
from collections.abc import Callable
from typing import Any

import pytest

from chapters.course import Course
from chapters.exercises import load
from chapters.tables import quoted
from chapters.weave import weave

POP = "def pop(self) -> int:\n    return self.items.pop(0)"
MARK = "<!-- weave: phase0_request/queue.py#pop -->"
SIGNATURE = MARK.replace(" -->", " signature -->")


def woven(course: Course, text: str) -> str:
    path = course.chapters / "00_request.md"
    path.write_bytes(text.encode())
    result = weave(course, path)
    assert result.problems == []
    return result.after


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (f"a\n{MARK}\nb\n", f"a\n{MARK}\n```python\n{POP}\n```\nb\n"),
        (f"{MARK}\n```python\nold\n```\nb\n", f"{MARK}\n```python\n{POP}\n```\nb\n"),
        (f"{MARK}\n```python\n```\n", f"{MARK}\n```python\n{POP}\n```\n"),
        (f"{MARK}\n\n```\nnot mine\n```\n", f"{MARK}\n```python\n{POP}\n```\n\n```\nnot mine\n```\n"),
        (f"{MARK}", f"{MARK}\n```python\n{POP}\n```"),
        ("- x\n  " + MARK + "\n", "- x\n  " + MARK + "\n  ```python\n  " + POP.replace("\n", "\n  ") + "\n  ```\n"),
    ],
)
def test_the_fence_after_a_marker_is_made_from_the_source(course: Course, before: str, after: str) -> None:
    assert woven(course, before) == after
    assert woven(course, after) == after


@pytest.mark.parametrize(
    "text",
    [
        f"````\n{MARK}\n```python\nold\n```\n````\n",
        f"```markdown\n{MARK}\n```\n",
        f"~~~\n{MARK}\n```\nx\n~~~\n",
        "```\n<!-- measured: host.json#steps.us.0 .2f -->9<!-- /measured -->\n```\n",
        "as in `<!-- measured: host.json#steps.us.0 .2f -->9<!-- /measured -->`\n",
        "```sh\nls\t \n\n```\ntext  \n\n\n```\nopen to the end\n",
    ],
)
def test_text_without_markers_is_unchanged(course: Course, text: str) -> None:
    assert woven(course, text) == text


def test_a_listing_with_a_fence_inside_gets_a_longer_one(course: Course) -> None:
    (course.root / "phase1_pool/doc.py").write_text('def f():\n    """\n    ```\n    x\n    ```\n    """\n')
    text = woven(course, "<!-- weave: phase1_pool/doc.py#f -->\n```python\nold\n```\nend\n")
    assert text.split("\n")[1] == "````python"
    assert text.endswith('    """\n````\nend\n')
    assert woven(course, text) == text


@pytest.mark.parametrize(
    ("marker", "value"),
    [
        ("host.json#steps.us.0 .2f", "0.84"),
        ("host.json#steps.us.1 d", "2"),
        ("host.json#figures.steps.us.0 .0%", "84%"),
        ("host.json#device s", "a CPU"),
        ("host.json#own.Queue.pop .2f", "0.50"),
    ],
)
def test_figures_are_made_from_results(course: Course, marker: str, value: str) -> None:
    line = (
        f"It takes <!-- measured: {marker} -->?<!-- /measured --> µs, <!-- measured: {marker} --><!-- /measured -->.\n"
    )
    assert woven(course, line) == line.replace("?", value).replace("--><!-- /", f"-->{value}<!-- /")


TABLES = """\
[steps]
file = "host.json"
head = "| $1 | step |"
row = "| $1 | {steps.us.$2 $3} µs |"
rows = [["first", "0", ".2f"], ["second", "1", "d"], ["", "1", ".1f"]]

[device]
file = "host.json"
head = "| {device s} | own |"
rows = ["| here | {host.json#own.Queue.pop .1f} |"]

[broken]
file = "host.json"
head = "| a |"
row = "| $2 |"
rows = [["one"]]
"""


@pytest.fixture
def tables(course: Course) -> None:
    (course.chapters / "tables").mkdir()
    (course.chapters / "tables/00_request.toml").write_text(TABLES)


@pytest.mark.usefixtures("tables")
def test_a_table_is_made_from_results_by_one_marker(course: Course) -> None:
    text = "<!-- generated: table {} -->\nold\n<!-- /generated -->\n"
    after = woven(course, text.format("steps") + text.format("device"))
    assert after == (
        "<!-- generated: table steps -->\n| $1 | step |\n|---|---|\n"
        "| first | 0.84 µs |\n| second | 2 µs |\n| | 2.0 µs |\n<!-- /generated -->\n"
        "<!-- generated: table device -->\n| a CPU | own |\n|---|---|\n| here | 0.5 |\n<!-- /generated -->\n"
    )
    assert woven(course, after) == after
    assert quoted(after, course.chapters, "00_request") == [
        *("host.json#steps.us.0", "host.json#steps.us.1", "host.json#steps.us.1"),
        *("host.json#device", "host.json#own.Queue.pop"),
    ]


@pytest.mark.usefixtures("tables")
@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("<!-- weave: phase0_request/queue.py#nothing -->", "there is no such region or definition"),
        ("<!-- weave phase0_request/queue.py#pop -->", "a malformed `weave` marker"),
        ("text <!-- weave: phase0_request/queue.py#pop -->", "a malformed `weave` marker"),
        (f"    {MARK}", "a malformed `weave` marker"),
        ("<!-- answers: 0 -->", "a malformed `answers` marker"),
        ("<!-- answers: 1 -->\nx\n<!-- /answers -->", "chapter 1 has no exercises"),
        ("<!-- answers: 0.1 0.9 -->\nx\n<!-- /answers -->", "there is no exercise 0.9"),
        ("<!-- measured: host.json#steps.us.0 .2f -->1", "a malformed `measured` marker"),
        ("<!-- measured: no.json#a d -->1<!-- /measured -->", "there is no result no.json"),
        ("<!-- measured: host.json#steps.ms d -->1<!-- /measured -->", "has no number or text at 'steps.ms'"),
        ("<!-- measured: host.json#steps.us.0 d -->1<!-- /measured -->", "'d' cannot format 0.837"),
        ("<!-- generated: nobody -->\n<!-- /generated -->", "nothing generates 'nobody'; there is a table NAME, core"),
        ("<!-- generated: table no -->\n<!-- /generated -->", "has no table 'no'; it has steps, device, broken"),
        ("<!-- generated: table broken -->\n<!-- /generated -->", "table 'broken' of 00_request.toml: IndexError"),
    ],
)
def test_a_marker_that_cannot_be_woven_is_a_problem(course: Course, line: str, message: str) -> None:
    path = course.chapters / "00_request.md"
    path.write_text(f"one\n{line}\n")
    result = weave(course, path)
    assert [problem for problem in result.problems if problem.startswith("chapters/00_request.md:2: ")]
    assert message in result.problems[0]
    assert not result.drifted


ANSWERS = """\
<!-- answers: 0 -->
<details>
<summary>0.1 Push</summary>

```python
# phase0_request/queue.py
self.items.append(item)
```

</details>
"""


def test_answers_are_folded_and_stand_nowhere_else(course: Course) -> None:
    signature = "<!-- weave: phase0_request/queue.py#Queue.pop signature -->"
    text = woven(course, f"{signature}\n\n<!-- answers: 0 -->\nold\n<!-- /answers -->\nend\n")
    assert text.startswith(f"{signature}\n```python\ndef pop(self) -> int:\n    ...\n```\n\n{ANSWERS}<details>\n")
    assert text.endswith("return min(value, top)\n```\n\n</details>\n<!-- /answers -->\nend\n")
    assert woven(course, text) == text
    path = course.chapters / "00_request.md"
    path.write_text(f"{MARK}\n{text}")
    assert weave(course, path, load(course, 0)).problems == [
        "chapters/00_request.md:1: 'phase0_request/queue.py#pop' shows the answer to exercise 0.2; show its signature"
    ]


def test_a_page_has_the_answers_that_it_names(course: Course) -> None:
    text = woven(course, "<!-- answers: 0.3 0.1 -->\n<!-- /answers -->\n")
    assert re.findall(r"<summary>(.*)</summary>", text) == ["0.3 Clamp", "0.1 Push"]


def test_check_finds_drift_and_writes_nothing(
    course: Course, tool: Callable[..., Any], edit: Callable[[str, str, str], None]
) -> None:
    chapter = course.chapters / "00_request.md"
    chapter.write_text(f"{SIGNATURE}\n\n<!-- measured: host.json#steps.us.0 .2f --><!-- /measured -->\n")
    assert tool("weave").code == 0
    assert tool("weave", "--check").code == 0
    fresh = chapter.read_bytes()

    (course.root / "README.md").write_text(f"# Course\n{SIGNATURE}\n")
    (course.root / "phase1_pool/extra.py").write_text("# region lost\n")
    edit("phase0_request/queue.py", "def pop(self)", "def pop(self, at=0)")
    edit("chapters/results/host.json", "0.837", "0.9")
    said = tool("weave", "--check")
    assert said.code == 1
    assert "-def pop(self) -> int:\n+def pop(self, at=0) -> int:\n" in said.out
    assert "-<!-- measured: host.json#steps.us.0 .2f -->0.84<!-- /measured -->\n" in said.out
    assert "+<!-- measured: host.json#steps.us.0 .2f -->0.90<!-- /measured -->\n" in said.out
    assert "+def pop(self, at=0) -> int:\n+    ..." in said.out, "the README is checked, too"
    assert "phase1_pool/extra.py:1: region 'lost' is never closed" in said.out, "and the markers of all sources"
    assert chapter.read_bytes() == fresh

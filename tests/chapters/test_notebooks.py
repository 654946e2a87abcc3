"""Notebooks run in a clean kernel, are written only if every cell succeeded, and ask readers for a guess."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nbformat
import pytest

from chapters.course import Course
from chapters.predictions import guess


def put(course: Course, name: str, *sources: str) -> Path:
    cells = [nbformat.v4.new_markdown_cell("# Title", id="title")]
    cells += [nbformat.v4.new_code_cell(source, id=f"cell{index}") for index, source in enumerate(sources)]
    cells[1].metadata["execution"] = {"iopub.status.idle": "2020-01-01T00:00:00Z"}
    path = course.chapters / name
    notebook = nbformat.v4.new_notebook(
        cells=cells, metadata={"widgets": {}, "language_info": {"name": "python", "version": "2.7"}}
    )
    path.write_text(nbformat.writes(notebook) + "\n", encoding="utf-8")
    return path


def test_execution_writes_outputs_that_a_second_run_repeats(course: Course, tool: Callable[..., Any]) -> None:
    path = put(
        course,
        "00_request.ipynb",
        "import sys\nfrom phase0_request import Queue",
        "print(Queue().items)\nsys.executable",
    )
    assert tool("notebooks").out == "00_request.ipynb\n"
    said = tool("notebooks", "--execute")
    assert (said.code, said.out) == (0, "00_request.ipynb: executed\n")
    first = path.read_bytes()
    notebook = nbformat.read(path, as_version=4)
    assert notebook.cells[2].outputs[0].text == "[]\n"
    assert notebook.cells[2].outputs[1].data["text/plain"] == repr(sys.executable)
    assert [cell.metadata for cell in notebook.cells] == [{}, {}, {}]
    assert [cell.id for cell in notebook.cells] == ["title", "cell0", "cell1"]
    assert sorted(notebook.metadata) == ["kernelspec", "language_info"]
    assert notebook.metadata.language_info == {"name": "python"}
    assert tool("notebooks", "--execute", "00_request.ipynb").code == 0
    assert path.read_bytes() == first


def test_a_failing_cell_is_named_and_the_file_is_untouched(course: Course, tool: Callable[..., Any]) -> None:
    path = put(course, "00_bad.ipynb", "x = 1", "1 / 0", "print('never')")
    before = path.read_bytes()
    said = tool("notebooks", "--execute")
    assert said.code == 1
    assert "00_bad.ipynb, cell 3: ZeroDivisionError: division by zero" in said.out
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    ("given", "said"), [("1,500", "It is 1,000 ms. You said 1,500 ms, 1.5 times as much.\n"), ("", ""), ("many", "")]
)
def test_a_guess_is_compared_with_what_was_found(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], given: str, said: str
) -> None:
    monkeypatch.setattr("builtins.input", lambda _: given)
    guess("How many?").compare(1000, "ms")
    assert capsys.readouterr().out == said

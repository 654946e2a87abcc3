"""start, hint, solution, status, and the stored progress."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from chapters.course import Course, CourseError
from chapters.exercises import load
from chapters.workspace import State, assemble, attempt, solution, start, workspace_line

Tool = Callable[..., Any]
Solve = Callable[[str, str], None]
Edit = Callable[[str, str, str], None]


def stages(course: Course) -> dict[str, str]:
    return {each.id: attempt(course, each).stage for each in load(course, course.phase(0))}


def test_start_copies_only_files_with_exercises_all_blank(course: Course, tool: Tool) -> None:
    said = tool("start", "0")
    assert said.code == 0
    laid = sorted(course.name(path) for path in course.workspace.rglob("*.py"))
    assert laid == ["workspace/phase0_request/limits.py", "workspace/phase0_request/queue.py"]
    text = (course.workspace / "phase0_request/queue.py").read_text()
    assert text.count("raise NotImplementedError") == 2
    assert "append" not in text
    assert "pop(0)" not in text
    assert "python -m chapters check 0" in said.out
    assert "workspace/phase0_request/queue.py: exercise 0.1, 0.2" in said.out


def test_start_never_overwrites_work(course: Course, tool: Tool, solve: Solve) -> None:
    tool("start", "0")
    assert tool("start", "0").code == 0
    solve("0.1", "self.items = [item]")
    mine = (course.workspace / "phase0_request/queue.py").read_bytes()
    said = tool("start", "0")
    assert said.code == 2
    assert "workspace/phase0_request/queue.py" in said.err
    assert "--fresh" in said.err
    assert (course.workspace / "phase0_request/queue.py").read_bytes() == mine


def test_fresh_backs_up_and_the_state_survives(course: Course, tool: Tool, solve: Solve) -> None:
    tool("start", "0")
    tool("hint", "0.1")
    for number in ("1", "2"):
        solve("0.1", f"self.items = [item] * {number}")
        (course.workspace / "phase0_request/notes.txt").write_text(number)
        assert tool("start", "0", "--fresh").code == 0
        backup = course.private / "backups" / number / "phase0_request"
        assert f"[item] * {number}" in (backup / "queue.py").read_text()
        assert (backup / "notes.txt").read_text() == number
        assert "[item]" not in (course.workspace / "phase0_request/queue.py").read_text()
    assert State(course).of("0.1").hints == 1
    shutil.rmtree(course.workspace)
    assert State(course).of("0.1").hints == 1


def test_assembly_fills_blanks_and_keeps_what_was_written(course: Course, tmp_path: Path, solve: Solve) -> None:
    start(course, course.phase(0))
    solve("0.1", "self.items = [item]")
    assert stages(course) == {"0.1": "attempted", "0.2": "not begun", "0.3": "not begun"}
    assemble(course, load(course, course.phase(0))[:1], tmp_path)
    text = (tmp_path / "phase0_request/queue.py").read_text()
    assert "self.items = [item]" in text
    assert "return self.items.pop(0)" in text
    assert "NotImplementedError" not in text


def test_one_exercise_alone_and_its_lines_in_the_workspace(course: Course, tmp_path: Path, solve: Solve) -> None:
    start(course, course.phase(0))
    solve("0.1", "self.items = [item]")
    solve("0.2", "return self.items[0]")
    second = load(course, course.phase(0))[1]
    assemble(course, [second], tmp_path)
    file = Path(second.file)
    lines = (tmp_path / file).read_text().split("\n")
    assert "        self.items.append(item)" in lines
    workspace = (course.workspace / file).read_text().split("\n")
    mine = lines.index("        return self.items[0]") + 1
    assert mine != workspace.index(lines[mine - 1]) + 1
    place = f"workspace/{second.file}:{workspace.index(lines[mine - 1]) + 1}"
    assert workspace_line(course, tmp_path, file, mine) == place
    assert workspace_line(course, tmp_path, file, lines.index("        self.items.append(item)") + 1) == ""


def test_a_missing_region_or_file_does_not_affect_the_others(
    course: Course, edit: Callable[[str, str, str], None]
) -> None:
    start(course, course.phase(0))
    edit("workspace/phase0_request/queue.py", "# region exercise 0.1", "# mine")
    found = {each.id: attempt(course, each) for each in load(course, course.phase(0))}
    assert found["0.1"].stage == "region missing"
    assert "workspace/phase0_request/queue.py:" in found["0.1"].note
    assert found["0.3"].stage == "not begun"
    (course.workspace / "phase0_request/limits.py").unlink()
    assert stages(course)["0.3"] == "region missing"


def test_a_syntax_error_has_its_line_in_the_learners_file(course: Course, solve: Solve) -> None:
    start(course, course.phase(0))
    solve("0.1", "self.items.append(item))")
    path = course.workspace / "phase0_request/queue.py"
    line = path.read_text().split("\n").index("        self.items.append(item))") + 1
    solve("0.2", "return self.items.pop(0)")
    first, second = (attempt(course, each) for each in load(course, course.phase(0))[:2])
    assert (first.stage, second.stage) == ("syntax error", "attempted")
    assert first.note.startswith(f"workspace/phase0_request/queue.py:{line}: unmatched ')'")


def test_solution_is_the_difference_to_the_reference(course: Course, tool: Tool, solve: Solve) -> None:
    exercise = load(course, course.phase(0))[1]
    assert solution(course, exercise)[-3:] == [
        "-        # Take the item that came first.",
        '-        raise NotImplementedError("exercise 0.2: Pop")',
        "+        return self.items.pop(0)",
    ]
    tool("start", "0")
    solve("0.2", "return self.items.pop()")
    assert "-        return self.items.pop()" in tool("solution", "0.2").out
    (course.workspace / exercise.file).write_text((course.root / exercise.file).read_text())
    assert "equals the reference" in tool("solution", "0.2").out


def test_hints_come_one_at_a_time(course: Course, tool: Tool) -> None:
    first, second, third = tool("hint", "0.1"), tool("hint", "0.1"), tool("hint", "0.1")
    assert "Hint 1 of 2: A list has a method.\n1 more." in first.out
    assert "append" not in first.out
    assert "Hint 2 of 2: It is `append`.\n" in second.out
    assert "1 of 2" in third.out
    assert "0 more" in third.out
    assert json.loads((course.private / "state.json").read_text())["0.1"]["hints"] == 2


def test_status_counts(course: Course, tool: Tool) -> None:
    State(course).update("0.1", passed=True, result="passed")
    State(course).update("0.3", hints=1, result="failed")
    row = next(line for line in tool("status").out.split("\n") if "phase0_request" in line)
    assert row.split() == ["0", "phase0_request", "3", "1/3", "0.3", "failed", "0/0", "1"]


def test_status_says_which_result_is_of_an_older_answer(
    course: Course, tool: Tool, solve: Solve, edit: Edit, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    start(course, course.phase(0))
    solve("0.3", "return value")
    assert tool("check", "0.3").code == 1
    assert "  0.3 failed  " in tool("status").out
    edit("workspace/phase0_request/limits.py", "return value", "return min(value, top)")
    assert "  0.3 failed before your last edit  " in tool("status").out
    assert tool("check", "0.3").code == 0
    assert "0.3" not in tool("status").out


@pytest.mark.parametrize("text", ["{", "[]", '{"0.1": {"unknown": 1}}', '{"0.1": 3}'])
def test_a_corrupt_state_file_is_kept(course: Course, text: str) -> None:
    course.private.mkdir()
    (course.private / "state.json").write_text(text)
    with pytest.raises(CourseError, match=r"\.course/state\.json cannot be read"):
        State(course).update("0.1", hints=1)
    assert (course.private / "state.json").read_text() == text

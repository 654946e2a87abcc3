"""start, hint, solution, status, run, mine, watch, and the stored progress."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
import pytest

from chapters import prose
from chapters.commands import execute
from chapters.course import Course, CourseError
from chapters.exercises import find, load
from chapters.source import find_regions, replace_regions
from chapters.workspace import State, answered, attempt, solution, start
from tests.phase6_integration.life import ENVIRONMENT, PATIENCE, Life

Tool = Callable[..., Any]
Solve = Callable[[str, str], None]
Edit = Callable[[str, str, str], None]
HOME = Path(__file__).resolve().parents[2]


def stages(course: Course) -> dict[str, str]:
    return {each.id: attempt(course, each)[0] for each in load(course, 0)}


def test_start_never_overwrites_work_and_fresh_backs_it_up(course: Course, tool: Tool, solve: Solve) -> None:
    assert "workspace/phase0_request/queue.py: exercise 0.1, 0.2" in tool("start", "0").out
    written = sorted(course.name(path) for path in course.workspace.rglob("*.py"))
    assert written == ["workspace/phase0_request/limits.py", "workspace/phase0_request/queue.py"]
    file = course.workspace / "phase0_request/queue.py"
    blank = file.read_text()
    assert blank.count("raise NotImplementedError") == 2
    assert tool("start", "0").code == 0
    for number in ("1", "2"):
        solve("0.1", f"self.items = [item] * {number}")
        mine = file.read_text()
        said = tool("start", "0")
        assert (said.code, "workspace/phase0_request/queue.py" in said.err, "--fresh" in said.err) == (2, True, True)
        assert file.read_text() == mine
        assert tool("start", "0", "--fresh").code == 0
        assert (course.private / "backups" / number / "phase0_request/queue.py").read_text() == mine
        assert file.read_text() == blank


def test_start_puts_the_path_of_a_chapter_and_then_all_of_it(
    course: Course, tool: Tool, solve: Solve, edit: Edit
) -> None:
    edit("chapters/00_exercises.toml", 'title = "Push"', 'title = "Push"\ncore = true')
    said = tool("start", "0")
    assert "2 more are beyond the core: `python -m chapters start 0 --all` adds them." in said.out
    assert [course.name(path) for path in course.workspace.rglob("*.py")] == ["workspace/phase0_request/queue.py"]
    text = (course.workspace / "phase0_request/queue.py").read_text()
    given = "        # given: exercise 0.2\n        return self.items.pop(0)\n"
    assert (given in text, "region exercise 0.2" in text) == (True, False), "an answer beyond the core is given"
    solve("0.1", "self.items.append(item)")
    assert "0.2" not in tool("check").out
    assert "exercise 0.2 is not in the workspace: `python -m chapters start 0 --all`" in tool("check", "0.2").err
    assert "0.1 failed before your last edit" not in tool("status").out
    assert tool("start", "0", "--all").code == 0
    assert stages(course) == {"0.1": "attempted", "0.2": "not begun", "0.3": "not begun"}
    row = next(line for line in tool("status").out.split("\n") if "core" in line)
    assert "████████ 1/1   core" in row
    assert "in the workspace" in row
    edit("workspace/phase0_request/queue.py", '"""A queue."""', "import bisect")
    assert tool("start", "0", "--all").code == 2
    assert tool("start", "0", "--fresh").code == 0
    assert stages(course) == {"0.1": "not begun", "0.2": "not begun", "0.3": "not begun"}


def test_start_leaves_rules_for_an_assistant_and_keeps_those_of_the_reader(course: Course, tool: Tool) -> None:
    tool("start", "0")
    rules = course.workspace / "AGENTS.md"
    assert prose.unknown(Course(HOME), rules) == []
    for needed in ("hint N.M", "check N.M", "What not to open", "chapters/*_exercises.toml", "`.course/`"):
        assert needed in rules.read_text()
    rules.write_text("Be kind.")
    tool("start", "0", "--fresh")
    assert rules.read_text() == "Be kind."


def test_work_outside_of_the_exercises_is_never_overwritten(course: Course, tool: Tool, edit: Edit) -> None:
    edit("chapters/00_exercises.toml", 'title = "Push"', 'title = "Push"\ncore = true')
    tool("start", "0")
    edit("workspace/phase0_request/queue.py", '"""A queue."""', "import bisect")
    said = tool("start", "0", "--all")
    assert (said.code, "workspace/phase0_request/queue.py" in said.err) == (2, True)
    assert "import bisect" in (course.workspace / "phase0_request/queue.py").read_text()


def test_chapters_that_share_a_file_keep_their_answers_apart(
    course: Course, tool: Tool, solve: Solve, edit: Edit
) -> None:
    """Chapter 7's exercise is in the file of 0.1 and 0.2; a file of its own says that it is begun."""
    edit("phase0_request/queue.py", "exercise 0.2", "exercise 7.1")
    (course.root / "phase0_request/more.py").write_text(
        "def more():\n    # region exercise 7.2\n    return 1\n    # endregion\n"
    )
    known = (course.chapters / "00_exercises.toml").read_text().replace('"0.2"', '"7.1"')
    first, second, third = known.split("[[exercise]]")[1:]
    other = third.replace('"0.3"', '"7.2"').replace("limits.py", "more.py")
    (course.chapters / "00_exercises.toml").write_text(f"[[exercise]]{first}[[exercise]]{third}")
    (course.chapters / "07_exercises.toml").write_text(f"[[exercise]]{second}[[exercise]]{other}")
    tool("start", "0")
    solve("0.1", "self.items.append(item)")
    assert "chapter 7 is not in the workspace" in tool("check", "7").err
    assert "workspace/phase0_request/queue.py: exercise 7.1" in tool("start", "7").out
    solve("7.1", "return self.items.pop(0)")
    assert tool("start", "7").code == 2
    assert tool("start", "7", "--fresh").code == 0
    assert {id: attempt(course, find(course, id))[0] for id in ("0.1", "0.3", "7.1", "7.2")} == {
        "0.1": "attempted",
        "0.3": "not begun",
        "7.1": "not begun",
        "7.2": "not begun",
    }


def test_an_answer_stands_among_the_reference_of_the_others(course: Course, solve: Solve) -> None:
    start(course, 0)
    solve("0.1", "self.items = [item]")
    assert stages(course) == {"0.1": "attempted", "0.2": "not begun", "0.3": "not begun"}
    files = answered(course, load(course, 0)[:1])
    assert list(files) == ["phase0_request/queue.py"]
    assert "self.items = [item]" in files["phase0_request/queue.py"]
    assert "return self.items.pop(0)" in files["phase0_request/queue.py"]
    assert "NotImplementedError" not in files["phase0_request/queue.py"]


def test_a_fault_in_a_region_does_not_affect_the_others(course: Course, edit: Edit, solve: Solve) -> None:
    start(course, 0)
    solve("0.1", "self.items.append(item))")
    solve("0.2", "return self.items.pop(0)")
    path = course.workspace / "phase0_request/queue.py"
    line = path.read_text().split("\n").index("        self.items.append(item))") + 1
    first, second, _ = (attempt(course, each) for each in load(course, 0))
    assert (first[0], second[0]) == ("syntax error", "attempted")
    assert first[1].startswith(f"workspace/phase0_request/queue.py:{line}: unmatched ')'")
    edit("workspace/phase0_request/queue.py", "# region exercise 0.1", "# mine")
    (course.workspace / "phase0_request/limits.py").unlink()
    first, _, third = (attempt(course, each) for each in load(course, 0))
    assert (first[0], third) == ("region missing", ("region missing", "workspace/phase0_request/limits.py is gone"))
    assert "workspace/phase0_request/queue.py:" in first[1]


def test_solution_is_the_difference_to_the_reference(course: Course, tool: Tool, solve: Solve) -> None:
    exercise = load(course, 0)[1]
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


def test_hints_come_one_at_a_time_and_status_counts(course: Course, tool: Tool) -> None:
    first, second, third = tool("hint", "0.3"), tool("hint", "0.1"), tool("hint", "0.1")
    assert first.out.startswith("Hint 1 of 1: `min`\n0 more. `solution 0.3` shows the answer.")
    assert second.out == "Hint 1 of 2: A list has a method.\n1 more.\n"
    assert "Hint 2 of 2: It is `append`.\n0 more. `solution 0.1` shows the answer." in third.out
    assert json.loads((course.private / "state.json").read_text())["0.1"]["hints"] == 2
    State(course).update("0.1", passed=True, result="passed")
    State(course).update("0.3", result="failed")
    row = next(line for line in tool("status").out.split("\n") if "failed" in line)
    assert row.split()[0] == "0"
    assert row.split()[-7:] == ["███░░░░░", "1/3", "beyond", "0.3", "failed,", "3", "hints"]


@pytest.mark.parametrize("text", ["{", '{"0.1": {"unknown": 1}}'])
def test_a_corrupt_state_file_is_kept(course: Course, text: str) -> None:
    course.private.mkdir()
    (course.private / "state.json").write_text(text)
    with pytest.raises(CourseError, match=r"\.course/state\.json cannot be read"):
        State(course).update("0.1", hints=1)
    assert (course.private / "state.json").read_text() == text


# All commands


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["start", "7"], "chapter 7 has no exercises; chapters that have some: 0"),
        (["check", "7"], "chapter 7 has no exercises"),
        (["check", "0.x"], "a chapter is a number, an exercise N.M, not '0.x'"),
        (["check", "--timeout", "nan"], "invalid time of 0 to 86400 seconds value: 'nan'"),
        (["hint", "0.9"], "there is no exercise 0.9; the exercises are: 0.1, 0.2, 0.3"),
        (["exercises", "4"], "chapter 4 has no exercises"),
        (["break", "4"], "chapter 4 has no bugs; chapters that have some: none"),
        (["run", "4"], "there is no phase 4; the phases are: 0, 1"),
        (["run", "0", "--item", "3"], "`python -m chapters start N` creates it"),
        (["quiz", "3"], "chapter 3 has no questions"),
        (["dance"], "invalid choice"),
    ],
)
def test_a_wrong_argument_is_an_error_that_says_what_is_allowed(tool: Tool, argv: list[str], message: str) -> None:
    said = tool(*argv)
    assert (said.code, said.out) == (2, "")
    assert message in said.err


# Programs with the workspace's code


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "chapters", *arguments]


def test_run_gives_the_phase_its_arguments_and_its_exit_code(standalone: Course, solve: Solve) -> None:
    start(standalone, 0)
    solve("0.1", "self.items.append(2 * item)")
    run = command("run", "0", "--item", "3")
    done = subprocess.run(run, cwd=standalone.root, capture_output=True, text=True, timeout=50)
    assert (done.returncode, done.stdout, done.stderr) == (6, "Yours: 0.1.\n[6]\n", "")


def test_a_phase_with_a_broken_answer_is_not_run(standalone: Course, solve: Solve) -> None:
    start(standalone, 0)
    solve("0.3", "return min(value,, top)")
    done = subprocess.run(command("run", "0"), cwd=standalone.root, capture_output=True, text=True, timeout=50)
    assert (done.returncode, done.stderr) == (1, "")
    assert "syntax error   workspace/phase0_request/limits.py:4: invalid syntax" in done.stdout


def test_mine_serves_what_passed_and_says_what_runs_here(
    course: Course, tool: Tool, solve: Solve, edit: Edit, monkeypatch: pytest.MonkeyPatch
) -> None:
    served: list[Any] = []
    monkeypatch.setattr("chapters.commands.execute", lambda *given: served.append(given) or 0)
    monkeypatch.setattr("chapters.commands.has_gpu", lambda: False)
    edit("chapters/00_exercises.toml", 'title = "Clamp"', 'title = "Clamp"\nruns = "gpu"')
    start(course, 0)
    assert tool("mine").out == "Yours: nothing yet.\n"
    solve("0.1", "self.items.append(item)")
    solve("0.2", "return self.items.pop()")
    solve("0.3", "return min(value, top)")
    tool("check")
    assert tool("mine").out.splitlines() == [
        "Yours and running: 0.1 (1 lines of code).",
        "Yours, but not run here: 0.3 (a GPU only; `python -m chapters mine --interpret` runs them slowly).",
        "Not passed as they are now, so the reference stands in: 0.2; `python -m chapters check` judges them.",
    ]
    assert tool("mine", "--interpret").out.splitlines() == [
        "Not passed as they are now, so the reference stands in: 0.2; `python -m chapters check` judges them.",
    ], "the run itself says which of them it runs"
    files = served[-1][2]
    assert "return self.items.pop(0)" in files["phase0_request/queue.py"], "0.2 failed"
    edit("workspace/phase0_request/queue.py", "self.items.pop()", "self.items.pop(0)")
    assert "the reference stands in: 0.2;" in tool("mine").out, "another answer has not been judged"
    tool("check")
    assert tool("mine").out.startswith("Yours and running: 0.1, 0.2 (2 lines of code).")
    edit("workspace/phase0_request/limits.py", "min(value, top)", "min(value,, top)")
    assert "the reference stands in: 0.3;" in tool("mine").out


def test_of_what_a_program_may_run_it_says_what_it_ran(standalone: Course) -> None:
    spans = {"phase0_request/queue.py": [(10, 12, "0.1"), (15, 17, "0.2")], "phase0_request/limits.py": [(1, 3, "0.3")]}
    ran = [sys.executable, "-m", "chapters.ran", json.dumps(spans), "phase0_request", "--item", "3"]
    done = subprocess.run(ran, cwd=standalone.root, capture_output=True, text=True, timeout=50)
    assert done.stdout.splitlines() == ["[3]", "Yours and run: 0.1, 0.2.", "Yours, but not run by this: 0.3."]
    assert done.returncode == 3, "the program's own"


def test_a_request_is_answered_with_the_workspaces_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine's process asks `reason_to_finish`, here an answer that ends each request at its fourth token."""
    course = Course(HOME)
    exercise = next(each for each in load(course, 0) if each.file == "phase0_request/batch.py")
    text = (HOME / exercise.file).read_text()
    (region,) = find_regions(text, exercise.file)[exercise.region]
    answer = f"{region.indent}return FinishReason.LENGTH if len(request.output_tokens) == 4 else None"
    upper = "\n\npush = StopScanner.push\nStopScanner.push = lambda self, text: push(self, text).upper()\n"
    front = "phase0_request/detokenizer.py"
    files = {exercise.file: replace_regions(text, exercise.file, {exercise.region: [[answer]]})}
    files[front] = (HOME / front).read_text() + upper
    started: list[Any] = []
    monkeypatch.setattr(os, "execve", lambda *arguments: started.extend(arguments))
    monkeypatch.setattr(Course, "private", tmp_path)
    execute(course, "run", files, ["-m", "phase6_integration.cli", "serve", "--port", "0"])
    _, arguments, environment = started
    environment = ENVIRONMENT | {
        name: environment[name] for name in ("NUMBA_CACHE_DIR", "PYTHONPATH", "PYTHONSAFEPATH")
    }
    process = subprocess.Popen(
        arguments, cwd=HOME, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    server = Life(process)
    try:
        url = server.listening()
        server.until("ready")
        body = {"model": "tiny_chat", "prompt": "What is a page?", "max_tokens": 8, "temperature": 0}
        reply = httpx2.post(f"{url}/v1/completions", json=body, timeout=PATIENCE).json()
        said = reply["choices"][0]["text"]
        assert reply["usage"]["completion_tokens"] == 4
        assert said == said.upper() != said.lower()
        server.signal(signal.SIGTERM)
        assert server.ended() == 0
    finally:
        process.kill()
        server.close()


def test_watch_checks_again_after_a_change_and_ends_cleanly(standalone: Course, solve: Solve) -> None:
    start(standalone, 0)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command("watch", "0"), cwd=standalone.root, env=environment, **pipes)
    guard = threading.Timer(10 * PATIENCE, process.kill)  # ends a hang: it runs pytest twice, slowly on a busy machine
    guard.start()

    def shown() -> str:
        seen = ""
        for line in process.stdout or ():
            seen += line
            if "Watching" in line:
                break
        return seen

    try:
        assert shown().count("not begun") == 3
        solve("0.1", "self.items.append(item)")
        again = shown()
        assert ("passed" in again, "0.2" in again) == (True, False)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate()
    finally:
        guard.cancel()
        process.kill()
    assert (process.returncode, errors) == (130, "")

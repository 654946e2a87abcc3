"""run: the phase's own `python -m`, with the workspace's code."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from chapters.course import Course
from chapters.workspace import start

Tool = Callable[..., Any]
Solve = Callable[[str, str], None]


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "chapters", "run", "0", *arguments]


@pytest.fixture
def written(standalone: Course, solve: Solve) -> Course:
    """A course with a workspace that pushes twice the item; its other exercises are blank."""
    start(standalone, standalone.phase(0))
    solve("0.1", "self.items.append(2 * item)")
    return standalone


def test_arguments_go_to_the_phase_and_its_exit_code_comes_back(written: Course) -> None:
    done = subprocess.run(command("--item", "3"), cwd=written.root, capture_output=True, text=True, timeout=50)
    assert (done.returncode, done.stdout, done.stderr) == (6, "[6], a terminal: False\n", "")
    done = subprocess.run(command("--help"), cwd=written.root, capture_output=True, text=True, timeout=50)
    assert (done.returncode, done.stdout.partition(" [")[0]) == (0, "usage: python -m phase0_request")


@pytest.mark.skipif(os.name != "posix", reason="opens a pseudo-terminal")
def test_the_phase_has_the_terminal_and_its_signals(written: Course) -> None:
    ours, its = os.openpty()
    process = subprocess.Popen(command("--item", "3", "--wait"), cwd=written.root, stdin=its, stdout=its, stderr=its)
    os.close(its)
    try:
        with os.fdopen(ours, "rb", buffering=0) as terminal:
            assert terminal.readline() == b"[6], a terminal: True\r\n"
            process.send_signal(signal.SIGINT)
            while b"interrupted" not in (line := terminal.readline()):
                assert line in (b"^C", b"^C\r\n")
        assert process.wait(50) == 6
    finally:
        process.kill()
        process.wait()


def test_without_a_workspace_it_says_how_to_get_one(tool: Tool) -> None:
    said = tool("run", "0", "--item", "3")
    assert (said.code, "`python -m chapters start 0` creates it" in said.err) == (2, True)


def test_a_broken_file_is_reported_as_in_check(course: Course, tool: Tool, solve: Solve) -> None:
    start(course, course.phase(0))
    solve("0.3", "return min(value,, top)")
    said = tool("run", "0")
    assert (said.code, said.err) == (1, "")
    rows = [line for line in said.out.split("\n") if "syntax error" in line]
    assert [line in tool("check", "0").out for line in rows] == [True]
    assert "workspace/phase0_request/limits.py:4: invalid syntax" in rows[0]

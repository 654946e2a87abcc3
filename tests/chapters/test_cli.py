"""All commands: helpful errors, plain text when piped, a clean end after Ctrl-C."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import IO, Any

import pytest

from chapters.course import Course
from chapters.workspace import start

Tool = Callable[..., Any]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["start", "7"], "there is no phase 7; the phases are: 0, 1"),
        (["start", "1"], "phase 1 has no exercises; phases that have some: 0"),
        (["check", "7"], "there is no phase 7"),
        (["hint", "0.9"], "there is no exercise 0.9; the exercises are: 0.1, 0.2, 0.3"),
        (["solution", "x"], "there is no exercise x"),
        (["exercises", "4"], "there is no phase 4"),
        (["dance"], "invalid choice"),
        (["run", "7"], "there is no phase 7"),
        *[
            (["check", "--timeout", text], f"seconds are a number above 0, at most 86400 (a day), not '{text}'")
            for text in ("0", "soon", "nan")
        ],
    ],
)
def test_a_wrong_argument_is_an_error_that_says_what_is_allowed(tool: Tool, argv: list[str], message: str) -> None:
    said = tool(*argv)
    assert (said.code, said.out) == (2, "")
    assert message in said.err


def test_without_a_command_the_help_lists_the_commands(tool: Tool) -> None:
    said = tool()
    assert (said.code, "put a phase's exercises into workspace/" in said.out) == (0, True)


def test_piped_output_has_no_escape_codes_and_no_markup(
    course: Course, tool: Tool, solve: Callable[[str, str], None]
) -> None:
    start(course, course.phase(0))
    solve("0.1", 'raise ValueError("[bold]not markup[/bold] :smile:")')
    for argv in (["status"], ["exercises"], ["solution", "0.1"], ["weave", "--check"]):
        said = tool(*argv)
        assert said.out
        assert "\x1b" not in said.out
        assert max(map(len, said.out.split("\n"))) <= 120
    assert "[bold]not markup[/bold] :smile:" in " ".join(tool("check").out.split())


def read_until(stream: IO[str], text: str) -> str:
    seen = ""
    for line in stream:
        seen += line
        if text in line:
            return seen
    raise AssertionError(f"ended before {text!r}:\n{seen}")


@pytest.mark.skipif(os.name != "posix", reason="sends SIGINT")
def test_watch_checks_again_after_a_change_and_ends_cleanly(
    standalone: Course, solve: Callable[[str, str], None]
) -> None:
    start(standalone, standalone.phase(0))
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    process = subprocess.Popen(
        [sys.executable, "-m", "chapters", "watch", "0"],
        cwd=standalone.root,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    guard = threading.Timer(50, process.kill)
    guard.start()
    try:
        assert read_until(process.stdout, "Watching").count("not begun") == 3
        solve("0.1", "self.items.append(item)")
        again = read_until(process.stdout, "Watching")
        assert ("passed" in again, "0.2" in again) == (True, False)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate()
    finally:
        guard.cancel()
        process.kill()
    assert (process.returncode, errors) == (130, "")

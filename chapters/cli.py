"""`python -m chapters`: arguments and exit codes."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console

from chapters import answers, challenges, commands
from chapters.course import Course, CourseError

if TYPE_CHECKING:
    Known = argparse._SubParsersAction[argparse.ArgumentParser]  # the commands of a parser


def console() -> Console:
    """A console without markup; piped, it is wide enough for most lines."""
    width = None if sys.stdout.isatty() or "COLUMNS" in os.environ else 120
    return Console(width=width, markup=False, highlight=False, emoji=False)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0
    if not 0 < seconds <= 86_400:
        raise argparse.ArgumentTypeError(f"seconds are a number above 0, at most 86400 (a day), not '{text}'")
    return seconds


def _add(known: Known, name: str, run: object, help: str) -> argparse.ArgumentParser:
    """Add a command with the function that runs it."""
    command = known.add_parser(name, help=help, description=help)
    command.set_defaults(run=run)
    return command


def _timeout(command: argparse.ArgumentParser, seconds: float, what: str) -> None:
    help = f"{what} (default {seconds:g} s)"
    command.add_argument("--timeout", type=_seconds, default=seconds, metavar="S", help=help)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m chapters",
        description="The course: exercises in a workspace of your own, and checks of the book itself.",
        epilog="Begin with `start 0`, read chapters/00_request.md, edit the files in workspace/, then `check`.",
    )
    known = parser.add_subparsers(dest="command", metavar="COMMAND")
    for add in (_add_workspace, _add_bugs, _add_quiz, _add_book):
        add(known)
    return parser


def _add_workspace(known: Known) -> None:
    """Exercises: begin, judge, run, get help."""
    start = _add(known, "start", commands.start, "put a phase's exercises into workspace/")
    start.add_argument("phase", type=int)
    start.add_argument("--fresh", action="store_true", help="start over; old files move to .course/backups/")
    for name, judge, help in (
        ("check", answers.check, "judge each exercise that you have written, alone; then all together"),
        ("watch", answers.watch, "check, and judge again what a save changes"),
    ):
        command = _add(known, name, judge, help)
        command.add_argument("target", metavar="N | N.M", nargs="?", help="default: every phase in the workspace")
        _timeout(command, 120, "end an exercise's tests after this time")
    run = _add(known, "run", challenges.run, "run a phase with your workspace in place of the reference")
    run.add_argument("phase", type=int)
    run.add_argument("arguments", nargs=argparse.REMAINDER, metavar="ARG", help="passed on to `python -m phaseN_...`")
    help = "serve with your workspace in place of the reference: HTTP and playground"
    usage = "python -m chapters mine [ladder] [ARGUMENTS OF nanoserve serve, or of nanoserve bench ladder]"
    _add(known, "mine", answers.mine, help).usage = usage
    for name, show, help in (
        ("hint", commands.hint, "one more hint"),
        ("solution", commands.solution, "a diff between your region and the reference"),
    ):
        _add(known, name, show, help).add_argument("exercise", metavar="N.M")


def _add_bugs(known: Known) -> None:
    """Bugs that shipped in real engines."""
    command = _add(known, "break", challenges.break_it, "find and mend a bug that shipped in a real engine")
    help = "plant a bug of phase N, or the one with this id, such as 4b"
    command.add_argument("bug", nargs="?", metavar="N", help=help)
    act = command.add_mutually_exclusive_group()
    help = "run the reproduction; -m MODULE: a module"
    act.add_argument("--run", dest="program", nargs=argparse.REMAINDER, metavar="ARG", help=help)
    for flag, help in (
        ("--anyway", "plant a bug though exercises of its phase are open"),
        ("--check", "whether the planted bug is mended"),
        ("--hint", "one more hint"),
        ("--reveal", "what it is, where it shipped, and how it is mended"),
        ("--stop", "put the planted bug away; the files move to .course/backups/"),
        ("--list", "all bugs, and which of them are mended"),
        ("--gate", "prove that a test catches each bug"),
    ):
        act.add_argument(flag, action="store_true", help=help)
    _timeout(command, 120, "end each run of tests")


def _add_quiz(known: Known) -> None:
    """Questions, and how far the reader has come."""
    quiz = _add(known, "quiz", challenges.quiz, "five quick questions on a chapter")
    quiz.add_argument("chapter", type=int)
    quiz.add_argument("--answers", action="store_true", help="print all questions with their answers")
    _add(known, "status", commands.status, "every phase: exercises passed, bugs mended, hints used")


def _add_book(known: Known) -> None:
    """Checks of the book itself, and of the machine."""
    exercises = _add(
        known, "exercises", commands.exercises, "list the exercises, or prove that tests catch each of them"
    )
    exercises.add_argument("phases", type=int, nargs="*", metavar="N", help="default: every phase")
    exercises.add_argument("--gate", action="store_true", help="blank each exercise on its own: its tests must fail")
    help = "with --gate: end each run after this time (120 s)"
    exercises.add_argument("--timeout", type=_seconds, metavar="S", help=help)
    weave = _add(known, "weave", commands.weave, "write listings and measured figures into the chapters and the README")
    weave.add_argument("--check", action="store_true", help="write nothing; exit 1 if something drifted")
    notebooks = _add(known, "notebooks", commands.notebooks, "list the notebooks, or execute them")
    notebooks.add_argument("names", nargs="*", metavar="NAME", help="default: every notebook")
    notebooks.add_argument("--execute", action="store_true", help="run from a clean kernel and write the outputs")
    help = "this machine, its tier, and a proof that the reference works"
    _timeout(_add(known, "doctor", commands.doctor, help), 180, "end the proof")


def main(argv: Sequence[str] | None = None, course: Course | None = None) -> int:
    """Run one command. Exit codes: 0 success, 1 the command found a problem, 2 wrong usage."""
    argv = list(sys.argv[1:] if argv is None else argv)
    passed_on = argv[1:] if argv[:1] == ["mine"] and argv[1:] not in (["-h"], ["--help"]) else []
    parser = _parser()
    args = parser.parse_args(argv[: len(argv) - len(passed_on)])
    if args.command is None:
        parser.print_help()
        return 0
    args.passed_on = passed_on
    course = course or Course.here()
    out = console()
    try:
        if args.command != "doctor":
            course.need_checkout(f"python -m chapters {args.command}")
        code: int = args.run(course, args, out)
        return code
    except CourseError as error:
        Console(stderr=True, markup=False, highlight=False, emoji=False).print(f"error: {error}", soft_wrap=True)
        return 2
    except KeyboardInterrupt:
        out.print("\nStopped.")
        return 130

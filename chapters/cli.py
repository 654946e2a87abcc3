"""`python -m chapters`: arguments and exit codes."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from rich.console import Console

from chapters import authoring, challenges, commands
from chapters.course import Course, CourseError

if TYPE_CHECKING:
    Known = argparse._SubParsersAction[argparse.ArgumentParser]  # the commands of a parser
    Command = Callable[[Course, argparse.Namespace, Console], int]


def console() -> Console:
    """A console without markup; piped, it is wide enough for most lines."""
    width = None if sys.stdout.isatty() or "COLUMNS" in os.environ else 120
    return Console(width=width, markup=False, highlight=False, emoji=False)


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 < seconds <= 86_400:
        raise ValueError("at most a day")
    return seconds


_seconds.__name__ = "time of 0 to 86400 seconds"  # what argparse says of another value


def _add(known: Known, name: str, run: Command, help: str, seconds: float = 0) -> argparse.ArgumentParser:
    """Add a command with the function that runs it, and with the seconds after which it ends its tests."""
    command = known.add_parser(name, help=help, description=help)
    command.set_defaults(run=run)
    if seconds:
        help = f"end a run of tests after this time (default {seconds:g} s)"
        command.add_argument("--timeout", type=_seconds, default=seconds, metavar="S", help=help)
    return command


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m chapters",
        description="The course: exercises in a workspace of your own, and checks of the book itself.",
        epilog="Begin with `start 0`, read chapters/00_request.md, edit the files in workspace/, then `check`.",
    )
    known = parser.add_subparsers(dest="command", metavar="COMMAND")
    _add_workspace(known)
    _add_challenges(known)
    _add_authoring(known)
    return parser


def _add_workspace(known: Known) -> None:
    """Exercises: begin, judge, run, get help."""
    start = _add(
        known, "start", commands.start, "put a chapter's exercises of the core into workspace/; beyond it, all of them"
    )
    start.add_argument("chapter", type=int)
    start.add_argument("--all", action="store_true", help="those beyond the core, too")
    start.add_argument("--fresh", action="store_true", help="start over; old files move to .course/backups/")
    check = _add(
        known, "check", commands.check, "judge each exercise that you have written, alone; then all together", 120
    )
    watch = _add(known, "watch", commands.watch, "check, and judge again what a save changes", 120)
    for command in (check, watch):
        command.add_argument("targets", metavar="N | N.M", nargs="*", help="default: every chapter in the workspace")
    run = _add(known, "run", commands.run, "run a phase with your workspace in place of the reference")
    run.add_argument("phase", type=int)
    run.add_argument("arguments", nargs=argparse.REMAINDER, metavar="ARG", help="passed on to `python -m phaseN_...`")
    mine = _add(
        known,
        "mine",
        commands.mine,
        "serve with the answers that passed in place of the reference, and say which of them run here",
    )
    mine.usage = (
        "python -m chapters mine [ARGUMENTS OF nanoserve serve]\n"
        "       python -m chapters mine ladder [ARGUMENTS OF nanoserve bench ladder]\n"
        "       python -m chapters mine --interpret [QUESTION] [--max-tokens N]: through your kernels in Triton"
    )
    hint = _add(known, "hint", commands.hint, "one more hint")
    solution = _add(known, "solution", commands.solution, "a diff between your region and the reference")
    for command in (hint, solution):
        command.add_argument("exercise", metavar="N.M")
    _add(known, "status", commands.status, "every chapter: exercises passed, bugs mended, hints used")


def _add_challenges(known: Known) -> None:
    """Bugs that shipped in real engines, and questions."""
    bug = _add(known, "break", challenges.break_it, "find and mend a bug that shipped in a real engine", 120)
    bug.add_argument(
        "bug", nargs="?", metavar="N", help="plant a bug of chapter N, or the one with this id, such as 4b"
    )
    help = "1: the symptom only (hardest), and you write a test; 2: with a reproduction (default); 3: with the file"
    bug.add_argument("--grade", type=int, choices=(1, 2, 3), default=2, help=help)
    act = bug.add_mutually_exclusive_group()
    help = "run the reproduction; -m MODULE: a module"
    act.add_argument("--run", dest="program", nargs=argparse.REMAINDER, metavar="ARG", help=help)
    for flag, help in (
        ("--test", "run your test, workspace/bug/test_bug.py, with the bug"),
        ("--check", "whether the planted bug is mended"),
        ("--hint", "one more hint"),
        ("--reveal", "what it is, where it shipped, and how it is mended"),
        ("--stop", "put the planted bug away; the files move to .course/backups/"),
        ("--list", "all bugs, and which of them are mended"),
        ("--gate", "prove that a test catches each bug"),
    ):
        act.add_argument(flag, action="store_true", help=help)
    quiz = _add(known, "quiz", challenges.quiz, "five quick questions on a chapter")
    quiz.add_argument("chapter", type=int)
    quiz.add_argument("--answers", action="store_true", help="print all questions with their answers")


def _add_authoring(known: Known) -> None:
    """Checks of the book itself, and of the machine."""
    help = "list the exercises, or prove that tests catch each of them"
    exercises = _add(known, "exercises", authoring.exercises, help, 120)
    exercises.add_argument("chapters", type=int, nargs="*", metavar="N", help="default: every chapter")
    exercises.add_argument("--gate", action="store_true", help="each blank must fail, and each other right answer pass")
    weave = _add(
        known, "weave", authoring.weave, "write listings and measured figures into the chapters and the README"
    )
    weave.add_argument("--check", action="store_true", help="write nothing; exit 1 if something drifted")
    help = "whether the pinned lines of other engines hold what the book names; over the network"
    _add(known, "elsewhere", authoring.elsewhere, help)
    notebooks = _add(known, "notebooks", authoring.notebooks, "list the notebooks, or execute them")
    notebooks.add_argument("names", nargs="*", metavar="NAME", help="default: every notebook")
    notebooks.add_argument("--execute", action="store_true", help="run from a clean kernel and write the outputs")
    _add(known, "doctor", authoring.doctor, "this machine, and a proof that the reference works on it", 180)


def main(argv: Sequence[str] | None = None, course: Course | None = None) -> int:
    """Run one command. Exit codes: 0 success, 1 the command found a problem, 2 wrong usage."""
    argv = list(sys.argv[1:] if argv is None else argv)
    passed_on = argv[1:] if argv[:1] == ["mine"] and argv[1:] not in (["-h"], ["--help"]) else []
    parser = make_parser()
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

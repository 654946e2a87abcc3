"""`python -m chapters`: arguments and exit codes."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from rich.console import Console

from chapters import answers, challenges, commands
from chapters.course import Course, CourseError


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


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m chapters",
        description="The course: exercises in a workspace of your own, and checks of the book itself.",
        epilog="Begin with `start 0`, read chapters/00_request.md, edit the files in workspace/, then `check`.",
    )
    known = parser.add_subparsers(dest="command", metavar="COMMAND")

    def command(name: str, run: object, help: str) -> argparse.ArgumentParser:
        sub = known.add_parser(name, help=help, description=help)
        sub.set_defaults(run=run)
        return sub

    def timeout(sub: argparse.ArgumentParser, seconds: float, what: str) -> None:
        sub.add_argument(
            "--timeout", type=_seconds, default=seconds, metavar="S", help=f"{what} (default {seconds:g} s)"
        )

    start = command("start", commands.start, "put a phase's exercises into workspace/")
    start.add_argument("phase", type=int)
    start.add_argument("--fresh", action="store_true", help="start over; old files move to .course/backups/")
    for name, run, help in (
        ("check", answers.check, "judge each exercise that you have written, alone; then all together"),
        ("watch", answers.watch, "check, and judge again what a save changes"),
    ):
        sub = command(name, run, help)
        sub.add_argument("target", metavar="N | N.M", nargs="?", help="default: every phase in the workspace")
        timeout(sub, 120, "end an exercise's tests after this time")
    sub = command("run", challenges.run, "run a phase with your workspace in place of the reference")
    sub.add_argument("phase", type=int)
    sub.add_argument("arguments", nargs=argparse.REMAINDER, metavar="ARG", help="passed on to `python -m phaseN_...`")
    help = "serve with your workspace in place of the reference: HTTP and playground"
    usage = "python -m chapters mine [ladder] [ARGUMENTS OF nanoserve serve, or of nanoserve bench ladder]"
    command("mine", answers.mine, help).usage = usage
    for name, run, help in (
        ("hint", commands.hint, "one more hint"),
        ("solution", commands.solution, "a diff between your region and the reference"),
    ):
        command(name, run, help).add_argument("exercise", metavar="N.M")
    sub = command("break", challenges.break_it, "find and mend a bug that shipped in a real engine")
    sub.add_argument("bug", nargs="?", metavar="N", help="plant a bug of phase N, or the one with this id, such as 4b")
    act = sub.add_mutually_exclusive_group()
    act.add_argument(
        "--run",
        dest="program",
        nargs=argparse.REMAINDER,
        metavar="ARG",
        help="run the reproduction; -m MODULE: a module",
    )
    act.add_argument("--anyway", action="store_true", help="plant a bug though exercises of its phase are open")
    act.add_argument("--check", action="store_true", help="whether the planted bug is mended")
    act.add_argument("--hint", action="store_true", help="one more hint")
    act.add_argument("--reveal", action="store_true", help="what it is, where it shipped, and how it is mended")
    act.add_argument("--stop", action="store_true", help="put the planted bug away; the files move to .course/backups/")
    act.add_argument("--list", action="store_true", help="all bugs, and which of them are mended")
    act.add_argument("--gate", action="store_true", help="prove that a test catches each bug")
    timeout(sub, 120, "end each run of tests")
    sub = command("quiz", challenges.quiz, "five quick questions on a chapter")
    sub.add_argument("chapter", type=int)
    sub.add_argument("--answers", action="store_true", help="print all questions with their answers")
    command("status", commands.status, "every phase: exercises, passed, hints used")
    sub = command("exercises", commands.exercises, "list the exercises, or prove that tests catch each of them")
    sub.add_argument("phases", type=int, nargs="*", metavar="N", help="default: every phase")
    sub.add_argument("--gate", action="store_true", help="blank each exercise on its own: its tests must fail")
    sub.add_argument("--timeout", type=_seconds, metavar="S", help="with --gate: end each run after this time (120 s)")
    sub = command("weave", commands.weave, "write listings and measured figures into the chapters and the README")
    sub.add_argument("--check", action="store_true", help="write nothing; exit 1 if something drifted")
    sub = command("notebooks", commands.notebooks, "list the notebooks, or execute them")
    sub.add_argument("names", nargs="*", metavar="NAME", help="default: every notebook")
    sub.add_argument("--execute", action="store_true", help="run from a clean kernel and write the outputs")
    timeout(
        command("doctor", commands.doctor, "this machine, its tier, and a proof that the reference works"),
        180,
        "end the proof",
    )
    return parser


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

"""`nanoserve replay`: make one HTML file of a record, or of several side by side, that opens from disk."""

import argparse
import sys
from pathlib import Path

from phase0_request.checks import check_int, check_number
from phase5_continuous.record_file import read
from phase5_continuous.recorder import Line
from phase5_continuous.replay import Replay
from phase6_integration.engine.flags import Parser
from phase6_integration.wings.page.replay import replay


def add_flags(parser: Parser) -> None:
    parser.usage = "nanoserve replay FILE [FILE ...] [-o replay.html]"
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="a record; several: side by side (needed)")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", default=Path("replay.html"), help="(%(default)s)")


def run(given: argparse.Namespace, parser: Parser) -> int:
    try:
        for file in given.files:
            check(file)
        page = replay([(file.name.split(".")[0], file.read_bytes()) for file in given.files])
        given.output.write_text(page, "utf-8")
    except (ValueError, OSError) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 1
    print(given.output)
    return 0


def check(file: Path) -> None:
    """ValueError if a file is not a record that can be replayed to its end."""
    state = Replay()
    for number, line in enumerate(read(file)):
        try:
            check_times(line)
            state.apply(line)
        except (LookupError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(f"{file}: line {number + 1} does not follow from those before it: {error!r}") from None


def check_times(line: Line) -> None:
    """ValueError if a line's times are none."""
    check_number("t", line.get("t", 0), 0)
    if "ms" in line:
        plan, pack, ran, commit = line["ms"]
        for part in (plan, pack, ran, commit):
            check_number("ms", part, 0)
        check_int("step", line["step"], 0)

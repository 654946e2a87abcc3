"""`nanoserve replay`: make one HTML file of a record, or of several side by side, that opens from disk."""

import argparse
import gzip
import sys
from collections.abc import Iterable, Iterator
from io import BytesIO
from pathlib import Path

from phase0_request.support.checks import check_int, check_number
from phase0_request.support.flags import Parser
from phase5_continuous.extras.record.lines import Line
from phase5_continuous.extras.record.record_file import encoded, read
from phase5_continuous.extras.record.replay import Replay
from phase6_integration.extras.page.replay import replay


def add_flags(parser: Parser) -> None:
    parser.usage = "nanoserve replay FILE [FILE ...] [-o replay.html]"
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="a record; several: side by side (needed)")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", default=Path("replay.html"), help="(%(default)s)")


def run(given: argparse.Namespace, parser: Parser) -> int:
    try:
        page = replay([(file.name.split(".")[0], packed(checked(file, parser.prog))) for file in given.files])
        given.output.write_text(page, "utf-8")
    except (ValueError, OSError) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 1
    print(given.output)
    return 0


def checked(file: Path, prog: str) -> Iterator[Line]:
    """The lines of a record. ValueError if it cannot be replayed to its end; a warning if that is cut off."""
    state = Replay()
    for number, line in enumerate(read(file, lambda words: print(f"{prog}: {words}", file=sys.stderr)), 1):
        try:
            check_times(line)
            state.apply(line)
        except (LookupError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(f"{file}: line {number} does not follow from those before it: {error!r}") from None
        yield line


def packed(lines: Iterable[Line]) -> bytes:
    """Lines in a compressed file that is whole, as browsers require."""
    with gzip.GzipFile("", "wb", fileobj=(content := BytesIO()), mtime=0) as file:
        for line in lines:
            file.write(f"{encoded(line)}\n".encode("utf-8", "replace"))
    return content.getvalue()


def check_times(line: Line) -> None:
    """ValueError if a line's times are none."""
    check_number("t", line.get("t", 0), 0)
    if "ms" in line:
        plan, pack, ran, commit = line["ms"]
        for part in (plan, pack, ran, commit):
            check_number("ms", part, 0)
        check_int("step", line["step"], 0)

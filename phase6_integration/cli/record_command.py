"""`nanoserve record`: write what a running server does into a file, until Ctrl-C, SIGTERM or for some seconds."""

import argparse
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import httpx2

from phase0_request.support.checks import check_number
from phase0_request.support.flags import Parser
from phase5_continuous.extras.record.record_file import MAX_LINE, Lines, open_record
from phase6_integration.cli.common import (
    add_server,
    body_of,
    error_message,
    http_error,
    http_settings,
    lines_of,
    printable,
)

DEFAULT_URL = "http://127.0.0.1:8000"
PREFIX = "data:"
COMMENT = ":"
INTERRUPTS = {signal.SIGINT, signal.SIGTERM, signal.SIGALRM}


def add_flags(parser: Parser) -> None:
    parser.usage = "nanoserve record FILE [flags]"
    parser.add_argument("file", type=Path, metavar="FILE", help="to write; .gz compresses (needed)")
    parser.add_argument("--seconds", type=float, metavar="N", help="stop after so long (at Ctrl-C)")
    add_server(parser, DEFAULT_URL)


def run(given: argparse.Namespace, parser: Parser) -> int:
    options, count = vars(given), 0
    try:
        settings, seconds = http_settings(options), options.get("seconds")
        if seconds is not None:
            check_number("--seconds", seconds, 0, above=True)
    except ValueError as error:
        parser.error(str(error))
    try:
        with httpx2.Client(**settings) as client, client.stream("GET", "/record") as response:
            if response.status_code != 200:
                raise ValueError(f"the server answers {response.status_code}: {error_message(body_of(response))}")
            with open_record(given.file) as file, suppress(KeyboardInterrupt):
                for line in lines(response, seconds):
                    count += bool(line)
                    write(file, line)
                    if sys.stderr.isatty():
                        print(f"\r{count} lines; Ctrl-C ends the record ", end="", file=sys.stderr, flush=True)
    except httpx2.RequestError as error:
        print(f"{parser.prog}: {http_error(error, given.url)}", file=sys.stderr)
        return 1
    except (ValueError, OSError) as error:
        print(printable(f"{parser.prog}: {error}"), file=sys.stderr)
        return 1
    print(f"{count} lines; `nanoserve replay {given.file}` makes a page of them")
    return 0


def write(file: Lines, line: str) -> None:
    """Write a line, and be interrupted behind it: in the middle, a compressed file would be damaged. What came before
    a silence does not wait for the line after it."""
    try:
        signal.pthread_sigmask(signal.SIG_BLOCK, INTERRUPTS)
        if line:
            file.write(line)
        else:
            file.flush()
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, INTERRUPTS)


def lines(response: httpx2.Response, seconds: float | None) -> Iterator[str]:
    """The lines of a server's record, as they come, and an empty one for a comment, which it sends in a silence. The
    time is up by a signal, as if by Ctrl-C: a server that does nothing sends nothing. SIGTERM is a Ctrl-C too."""
    for number in (signal.SIGALRM, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, seconds or 0)
    try:
        for event in lines_of(response, MAX_LINE):
            if event.startswith((PREFIX, COMMENT)):
                yield event.removeprefix(PREFIX).strip() if event.startswith(PREFIX) else ""
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)

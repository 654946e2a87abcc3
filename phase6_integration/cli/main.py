"""main: one parser, a subcommand for each module of COMMANDS."""

import sys
from collections.abc import Sequence
from importlib.metadata import version

from phase6_integration.cli import (
    bench_command,
    chat_command,
    doctor_command,
    generate_command,
    models_command,
    serve_command,
)
from phase6_integration.cli.parsing import Parser

# Each has add(subparsers), which sets `run`: a function of the options, to an exit code.
COMMANDS = (serve_command, chat_command, generate_command, bench_command, models_command, doctor_command)


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code: 0 fine, 1 failed, 2 wrong arguments, 130 stopped by Ctrl-C, 141 by a pipe that nobody reads."""
    parser = Parser(prog="nanoserve", description="An LLM serving engine in seven phases.")
    parser.add_argument("--version", action="version", version=f"nano-serving {version('nano-serving')}")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=Parser)
    for command in COMMANDS:
        command.add(subparsers)
    options, unknown = parser.parse_known_args(arguments)
    if unknown:
        subparsers.choices[options.command].refuse(unknown)
    try:
        return int(options.run(options))
    except KeyboardInterrupt:
        print(f"{subparsers.choices[options.command].prog}: stopped", file=sys.stderr)
        return 130

"""`nanoserve doctor`: check what this machine has, run the bundled model on it, and say what to do about problems."""

import argparse
import socket
import textwrap

from rich.console import Console
from rich.text import Text

from phase0_request.support.flags import Parser
from phase0_request.support.machine import describe
from phase6_integration.cli.local_model import loading
from phase6_integration.support.machine_checks import Problem, State, findings

PORT = 8000
BEFORE = 20  # columns, of the state and the name
STYLES = {State.OK: "green", State.WARNING: "yellow", State.FAULT: "bold red"}


def add_flags(parser: Parser) -> None:
    parser.description = "Check this machine and run the bundled model on it. The exit code is 1 if there is a fault."


def run(_: argparse.Namespace, parser: Parser) -> int:
    console, states = Console(soft_wrap=True), []
    with loading("checking", console):
        for finding in findings(describe(), {"port": check_port}):
            states.append(finding.state)
            state = Text(f"{finding.state.value:<9}", STYLES[finding.state])
            console.print(state, Text(f"{finding.name:<11}{_indented(finding.words, console)}"), sep="")
            if finding.advice:
                console.print(Text(f"{'':<{BEFORE}}{_indented(finding.advice, console)}", "dim"))
    counts = {"fault": states.count(State.FAULT), "warning": states.count(State.WARNING)}
    found = ", ".join(f"{count} {what}{'' if count == 1 else 's'}" for what, count in counts.items())
    console.print(f"\n{found}.")
    return 1 if State.FAULT in states else 0


def _indented(words: str, console: Console) -> str:
    """Wrapped at words on a terminal, each line under the first."""
    width = console.width - BEFORE if console.is_terminal else 0
    return f"\n{'':<{BEFORE}}".join(textwrap.wrap(words, width, break_long_words=False)) if width > 0 else words


def check_port(number: int = PORT) -> str:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the server does
        try:
            probe.bind(("127.0.0.1", number))
        except OSError as error:
            words = f"{number} is not available: {error.strerror}"
            raise Problem(words, "a server may run already; choose another with --port; 0 is any free one") from None
    return f"{number} is free"

"""`nanoserve doctor`: check what this machine has, run the bundled model on it, and say what to do about problems."""

import argparse
import json
import socket
from http.client import HTTPException

from phase0_request.machine import describe
from phase6_integration.cli.common import loading
from phase6_integration.engine.flags import Parser
from phase6_integration.engine.machine_checks import Finding, State, findings

PORT = 8000


def add_flags(parser: Parser) -> None:
    parser.description = "Check this machine and run the bundled model on it. The exit code is 1 if there is a fault."


def run(_: argparse.Namespace, parser: Parser) -> int:
    from rich.console import Console
    from rich.text import Text

    console = Console(soft_wrap=True)
    styles = {State.OK: "green", State.WARNING: "yellow", State.FAULT: "bold red"}
    states = []
    with loading("checking", console):
        for finding in findings(describe(), {"port": check_port}):
            states.append(finding.state)
            state = Text(f"{finding.state.value:<9}", styles[finding.state])
            console.print(state, Text(f"{finding.name:<11}{finding.words}"), sep="")
            if finding.advice:
                console.print(Text(f"{'':<20}{finding.advice}", "dim"))
    console.print(f"\n{states.count(State.FAULT)} faults, {states.count(State.WARNING)} warnings.")
    return 1 if State.FAULT in states else 0


def check_port(number: int = PORT) -> Finding:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the server does
        try:
            probe.bind(("127.0.0.1", number))
        except OSError as error:
            if (ours := server_at(number)) is not None:
                return Finding(State.OK, "port", f"{number} is that of {ours}", "a second server needs another --port")
            words = f"{number} is not available: {error.strerror}"
            return Finding(State.WARNING, "port", words, "choose another with --port; 0 is any free one")
    return Finding(State.OK, "port", f"{number} is free")


def server_at(port: int) -> str | None:
    """The nano-serving server on this port; None if something else is there. Other servers have one of the two routes
    with such a body at most."""
    from phase6_integration.cli.probe import Address

    for tls in (False, True):
        address = Address(port=port, tls=tls)
        try:
            version, health = (json.loads(address.get(path, 1.0)[1]) for path in ("/version", "/health"))
            state = health.get("status") or health["error"]["code"]
            return f"a nano-serving server, version {version['version']}, which is {state}"
        except TimeoutError:
            return None
        except (OSError, HTTPException, ValueError, LookupError, TypeError, AttributeError):
            continue
    return None

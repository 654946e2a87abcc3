"""`nanoserve doctor`: what this machine has, and what to do where that is not enough."""

import argparse

from phase6_integration.cli.parsing import Subparsers


def add(subparsers: Subparsers) -> None:
    """Give `nanoserve` this command."""
    about = "what this machine has, and whether that is enough"
    parser = subparsers.add_parser(
        "doctor", help=about, description="Look at this machine and try the bundled model on it. Exit code 1: a fault."
    )
    parser.set_defaults(run=run)


def run(_: argparse.Namespace) -> int:
    """Each finding as it comes; 1 if one is a fault."""
    from rich.console import Console
    from rich.text import Text

    from phase0_request.machine import describe
    from phase6_integration.cli.checks import State, findings

    console = Console(soft_wrap=True)
    styles = {State.OK: "green", State.WARNING: "yellow", State.FAULT: "bold red"}
    states = []
    with console.status("looking"):
        for finding in findings(describe()):
            states.append(finding.state)
            state = Text(f"{finding.state.value:<9}", styles[finding.state])
            console.print(state, Text(f"{finding.name:<11}{finding.words}"), sep="")
            if finding.advice:
                console.print(Text(f"{'':<20}{finding.advice}", "dim"))
    warnings, faults = states.count(State.WARNING), states.count(State.FAULT)
    console.print(f"\n{faults} faults, {warnings} warnings." if faults or warnings else "\nAll is well.")
    return 1 if faults else 0

"""The `nanoserve` command. Each subcommand is a module that loads what it needs when it runs."""

from typing import NoReturn

from phase0_request.entry import run


def main() -> NoReturn:
    """The console script."""
    run("phase6_integration.cli.main:main")

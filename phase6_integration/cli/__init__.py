"""The `nanoserve` command. Each subcommand is a module, imported only when it is the one that runs."""

from typing import NoReturn

from phase0_request.support.entry import run


def main() -> NoReturn:
    """The console script."""
    run("phase6_integration.cli.main:main")

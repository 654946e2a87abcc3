"""The `nanoserve` command. Each subcommand is a module; what it needs is loaded when it runs."""

from phase6_integration.cli.main import main

__all__ = ["main"]

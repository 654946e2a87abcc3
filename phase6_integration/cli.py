"""The `nanoserve` command."""

import argparse
import sys
from importlib.metadata import version

from phase0_request.__main__ import main as phase0_server


def main(arguments: list[str] | None = None) -> int:
    """`nanoserve serve` runs the server of the newest phase that has one: for now phase 0's, with its mock model."""
    p = argparse.ArgumentParser(prog="nanoserve", description="An LLM serving engine in seven phases.")
    p.add_argument("--version", action="version", version=f"nano-serving {version('nano-serving')}")
    commands = p.add_subparsers(dest="command", required=True, metavar="COMMAND")
    serve = commands.add_parser("serve", help="run phase 0's server and its demo clients", add_help=False)
    serve.set_defaults(run=phase0_server)
    options, rest = p.parse_known_args(arguments)
    return int(options.run(rest, prog=f"nanoserve {options.command}"))


if __name__ == "__main__":
    sys.exit(main())

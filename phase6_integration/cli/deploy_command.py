"""`nanoserve deploy`: many replicas on this machine, by Ray Serve. `serve deploy` takes the same file to a cluster."""

import argparse
import os
import sys
from pathlib import Path

from phase0_request.support.flags import Parser


def add_flags(parser: Parser) -> None:
    parser.usage = "nanoserve deploy FILE [flags]"
    parser.add_argument("file", metavar="FILE", help="a configuration file of Ray Serve, in YAML (needed)")
    parser.add_argument("--check", action="store_true", help="check the file and start nothing (off)")


def run(given: argparse.Namespace, parser: Parser) -> int:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # Ray would report its use to its makers
    try:
        from phase6_integration.cluster.deploy import deploy, load
    except ModuleNotFoundError as error:
        if error.name not in ("ray", "zmq"):
            raise
        parser.error("this command needs Ray Serve: pip install 'nano-serving[cluster]'")
    try:
        load(Path(given.file))
    except (OSError, ValueError) as error:
        print(f"{parser.prog}: {given.file}: {error}", file=sys.stderr)
        return 2
    return 0 if "check" in given else deploy(Path(given.file))

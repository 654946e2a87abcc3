"""What the commands that speak to a server have in common: where it is, and the key to it."""

import argparse
import os
from collections.abc import Mapping
from typing import Any

from phase6_integration.cli.serve_command import KEYS


def add_server(group: argparse._ActionsContainer, default: str | None = None) -> None:
    about = f"of the server ({default})" if default else "of a server, such as http://127.0.0.1:8000"
    group.add_argument("--url", metavar="URL", default=default, help=about)
    group.add_argument("--api-key", metavar="KEY", help=f"for the server; also from {' or '.join(KEYS)}")


def key_of(given: Mapping[str, Any]) -> str | None:
    """The key given, or the environment's."""
    return given.get("api_key") or next((os.environ[name] for name in KEYS if os.environ.get(name)), None)

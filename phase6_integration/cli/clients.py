"""What the commands that ask a model have in common: which model, or which server and the key to it."""

import argparse
import os
from collections.abc import Mapping
from typing import Any

from phase6_integration.cli.parsing import Parser
from phase6_integration.cli.serve_command import ENGINE, KEYS, engine_options
from phase6_integration.options import EngineOptions


def add_server(group: argparse._ActionsContainer, default: str | None = None) -> None:
    about = f"of the server ({default})" if default else "of a server, such as http://127.0.0.1:8000"
    group.add_argument("--url", metavar="URL", default=default, help=about)
    group.add_argument("--api-key", metavar="KEY", help=f"for the server; also from {' or '.join(KEYS)}")


def key_of(given: Mapping[str, Any]) -> str | None:
    """The key given, or the environment's."""
    return given.get("api_key") or next((os.environ[name] for name in KEYS if os.environ.get(name)), None)


HERE = ("dtype", "device", "max-model-len", "kv-cache-pages", "threads")  # of the engine's flags, those for one caller


def add_model(parser: Parser, flag: bool = False) -> None:
    """The model, as an argument or a flag, and how it is run where it is run here."""
    about = "a directory, or a name on the Hugging Face hub; with --url, its name there (bundled: tiny_chat)"
    if flag:
        parser.add_argument("--model", metavar="MODEL", help=about)
    else:
        parser.add_argument("model", nargs="?", help=about)
    group = parser.add_argument_group("the model here")
    for name, kind, given, text in ENGINE:
        if name in HERE:
            group.add_argument(f"--{name}", type=kind, metavar=given, help=text)


def model_options(given: Mapping[str, Any]) -> EngineOptions:
    """What was said of the model here; nothing may be, if it is elsewhere."""
    said = [flag for flag in HERE if flag.replace("-", "_") in given]
    if not given["url"]:
        if "api_key" in given:
            raise ValueError("--api-key is for a server; say which with --url")
        return engine_options({name: value for name, value in given.items() if name != "seed"})
    if said:
        raise ValueError(f"--{said[0]} is for a model that is run here, and --url names a server")
    return EngineOptions()

"""A YAML file of flags for `nanoserve serve --config`: the names of flags, without the dashes, and their values.

It becomes arguments that the command's own parser reads, so that types and errors are those of the command line.
"""

import argparse
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from phase6_integration.engine.flags import Parser

NOT_IN_FILES = {"--help", "--config"}


def with_config(arguments: dict[str, Any], prog: str, add_flags: Callable[[Parser], None]) -> dict[str, Any]:
    """Arguments together with those of the file that --config names. They win over the file's."""
    return read_config(arguments["config"], prog, add_flags) | arguments if "config" in arguments else arguments


def read_config(file: str, prog: str, add_flags: Callable[[Parser], None]) -> dict[str, Any]:
    """The arguments in a file. Wrong ones end the program like those of the command line; a file that cannot be read
    is a ValueError. null is the same as not given."""
    parser = Parser(prog=f"{prog}: {file}")
    add_flags(parser)
    known = {flag for flag in parser.flags if not flag.startswith("--no-")} - NOT_IN_FILES
    arguments: list[str] = []
    unknown: list[str] = []
    for key, value in _load(file).items():
        flag = f"--{key.replace('_', '-')}"
        if key == "model":
            arguments[:0] = [] if value is None else [str(value)]
        elif flag not in known:
            unknown.append(flag)
        elif value is not None:
            arguments += _arguments(parser, flag, value)
    if unknown:
        parser.refuse(unknown, known)
    return vars(parser.parse_args(arguments))


def _arguments(parser: Parser, flag: str, value: Any) -> list[str]:
    """A flag and its value as they would be on the command line."""
    action = parser.flags[flag]
    if isinstance(action, argparse.BooleanOptionalAction):
        if not isinstance(value, bool):
            parser.error(f"argument {flag}: it is true or false")
        return [flag if value else flag.replace("--", "--no-", 1)]
    if isinstance(value, Mapping):
        return [f"{flag}={json.dumps(value)}"]
    values = value if isinstance(value, list) else [value]
    if len(values) > 1 and not isinstance(action, argparse._AppendAction):
        parser.error(f"argument {flag}: it takes one value, and here are {len(values)}")
    return [f"{flag}={one}" for one in values]


def _load(file: str) -> dict[str, Any]:
    import yaml

    try:
        content = yaml.safe_load(Path(file).read_text("utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read {file}: {error}") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}" if mark else ""
        raise ValueError(f"{file}{where} is not YAML: {getattr(error, 'problem', None) or error}") from None
    if content is None:
        return {}
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise ValueError(f"{file} must hold names of flags with their values")
    return content

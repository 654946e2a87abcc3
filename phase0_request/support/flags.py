"""The argument parser of all commands: flags made from dataclass fields, and errors of one line that name the nearest
command or flag."""

import argparse
import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import Field, fields
from difflib import get_close_matches
from fractions import Fraction
from typing import Any, NoReturn, get_args, get_origin, get_type_hints

WRONG_ARGUMENTS = 2
NUMBER = re.compile(r"(\d+(?:\.\d+)?)([kmgt])|(-?\d+)([KMGT]?)")
UNITS = {unit: 1000**power for power, unit in enumerate(("", *"kmgt"))} | {
    unit: 1024**power for power, unit in enumerate(("", *"KMGT"))
}


class Parser(argparse.ArgumentParser):
    """An argument parser without abbreviated flags. Its errors are one line and never repeat a value given to a flag
    it does not know, which may be an API key."""

    def __init__(self, **keywords: Any) -> None:
        super().__init__(allow_abbrev=False, argument_default=argparse.SUPPRESS, **keywords)

    def error(self, message: str) -> NoReturn:
        self.exit(WRONG_ARGUMENTS, f"{self.prog}: {message}\n")

    @property
    def flags(self) -> Mapping[str, argparse.Action]:
        """The actions by their flags."""
        return self._option_string_actions

    def refuse(self, unknown: Sequence[str], absent: str | None = None) -> NoReturn:
        """Exit with an error that names flags that do not exist, and the existing ones that may have been meant, or the
        `absent` extras that may have them."""
        flags = [argument.partition("=")[0] for argument in unknown if argument.startswith("-")]
        named = ", ".join(flag + did_you_mean(flag, self.flags) for flag in flags)
        named += f"; it may need {absent}, which is not here" if absent else ""
        self.error(f"no such flag: {named}" if flags else f"{len(unknown)} arguments too many")


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A question with the nearest known name; nothing if none is near."""
    nearest = get_close_matches(name, list(known), 1, 0.75)
    return f" (did you mean {nearest[0]}?)" if nearest else ""


# Flags from dataclass fields.


def add_fields(group: argparse._ActionsContainer, *kinds: type, only: Collection[str] | None = None) -> None:
    """Add a flag for each field of dataclasses that has a help text. Without the flag, the default stays."""
    for field, kind in _kinds(kinds):
        if "help" not in field.metadata or (only is not None and field.name not in only):
            continue
        flags = field.metadata["flags"] or (f"--{field.name.replace('_', '-')}",)
        help = field.metadata["help"]
        if kind is bool:
            default = "" if field.default is None else " (on)" if field.default else " (off)"
            switch = argparse.BooleanOptionalAction  # --flag and --no-flag
            group.add_argument(*flags, dest=field.name, action=switch, default=argparse.SUPPRESS, help=help + default)
            continue
        if isinstance(field.default, int | float | str):
            help += f" ({field.default})"
        several: dict[str, Any] = {"nargs": "+", "action": "extend"} if kind is tuple else {}
        metavar, read = field.metadata["metavar"], _reader(kind, field.metadata["words"])
        group.add_argument(*flags, dest=field.name, type=read, metavar=metavar, help=help, **several)


def values_of(given: Mapping[str, Any], *kinds: type) -> dict[str, Any]:
    """The arguments that are fields of dataclasses. A word that stands for a value is replaced by it."""
    values = {}
    for field, kind in _kinds(kinds):
        if field.name in given:
            value, words = given[field.name], field.metadata.get("words", {})
            if kind is tuple:
                value = tuple(part for text in value for part in _parts(field.name, text))
            values[field.name] = words.get(value, value) if isinstance(value, str) else value
    return values


def _kinds(options: Iterable[type]) -> Iterator[tuple[Field[Any], Any]]:
    """The fields of dataclasses, each with its type: without the None of an optional one, and without what a container
    holds."""
    for each in options:
        hints = get_type_hints(each)
        for field in fields(each):
            hint = hints[field.name]
            kind = get_args(hint)[0] if type(None) in get_args(hint) else hint
            yield field, get_origin(kind) or kind


def _reader(kind: Any, words: Collection[str]) -> Callable[[str], Any]:
    """The function that reads the value of a flag."""
    if kind is int:
        return lambda text: text if text in words else whole_number(text)
    readers: dict[Any, Callable[[str], Any]] = {tuple: str, str: str, float: float, Mapping: json_object}
    return readers[kind]


def whole_number(text: str) -> int:
    """An integer, also as 25.6k (25,600) or 2K (2,048), as vLLM reads them."""
    match = NUMBER.fullmatch(text.strip())
    if match is None:
        raise argparse.ArgumentTypeError(f"an integer such as 4096, 4k (4,000) or 4K (4,096) is needed, got {text!r}")
    decimal, unit, number, binary = match.groups()
    return int(number) * UNITS[binary] if decimal is None else int(Fraction(decimal) * UNITS[unit])


def json_object(text: str) -> dict[str, Any]:
    """Read a flag's value as a JSON object."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"a JSON object is needed: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"a JSON object is needed, got {type(value).__name__}")
    return value


def _parts(name: str, text: str) -> list[str]:
    """One value of a flag that takes several, or a JSON list of them, as in vLLM."""
    if not text.startswith("["):
        return [text]
    try:
        values = json.loads(text)
    except ValueError:
        values = None
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise ValueError(f"{name} must be values, or one JSON list of strings, got {text!r}")
    return values

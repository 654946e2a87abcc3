"""Settings as fields of a dataclass: each has its default, its check and the help of its command-line flag."""

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import field, fields
from functools import partial
from typing import Any, TypeVar

from phase0_request.support.checks import ConfigError, check_int, check_number, invalid

MAX_INT = 1 << 30
Check = Callable[[str, Any], object]  # (name, value); raises ValueError
T = TypeVar("T")


def option(
    default: Any,
    help: str,
    metavar: str = "N",
    check: Check | None = None,
    flags: tuple[str, ...] = (),
    words: Mapping[str, object] | None = None,
) -> Any:
    """A dataclass field with its check and its command-line flag. A function as default makes a new one each time;
    `flags` replaces the flag made from the name; `words` are other values of it, with those they stand for."""
    more = {"help": help, "metavar": metavar, "check": check, "flags": flags, "words": words or {}}
    return field(default_factory=default, metadata=more) if callable(default) else field(default=default, metadata=more)


def check_fields(options: Any, name: str = "") -> None:
    """Run the check of every field of a dataclass, which `name` stands before in errors. None is allowed where it is
    the default."""
    for option in fields(options):
        value, check = getattr(options, option.name), option.metadata.get("check")
        if check is not None and not (value is None and option.default is None):
            check(name + option.name, value)


# A core has settings of its own; those of its extras are a mapping, of which each extra reads its own dataclass.


def chosen(kind: type[T], given: Mapping[str, Any]) -> T:
    """A dataclass of settings, with the given values of its fields."""
    names = {field.name for field in fields(kind)}  # type: ignore[arg-type]
    return kind(**{name: value for name, value in given.items() if name in names})


def joined(core: Callable[..., T], extras: Collection[type], given: Mapping[str, Any]) -> T:
    """A core's settings, with its extras' settings in the field `more`. All are checked."""
    own = {field.name for field in fields(core)}  # type: ignore[arg-type]
    more = {name: value for name, value in given.items() if name not in own}
    known = own | {field.name for kind in extras for field in fields(kind)}
    if unknown := more.keys() - known:
        raise TypeError(f"there is no setting {', '.join(sorted(unknown))}")
    for kind in extras:
        chosen(kind, more)
    return core(**{name: value for name, value in given.items() if name in own}, more=more)


# Checks.


def text(what: str, pattern: str = "(?s).+") -> Check:
    """A check for a string that matches a pattern, described by `what`."""

    def check(name: str, value: object) -> None:
        if not isinstance(value, str) or not re.fullmatch(pattern, value):
            raise invalid(name, what, value)

    return check


def texts(what: str, pattern: str) -> Check:
    """A check for strings that match a pattern."""

    def check(name: str, values: Iterable[str]) -> None:
        if not all(re.fullmatch(pattern, value) for value in values):
            raise ConfigError(f"{name} must be {what}")

    return check


def at_least(low: int) -> Check:
    return partial(check_int, low=low, high=MAX_INT)


positive: Check = partial(check_number, low=0, above=True)

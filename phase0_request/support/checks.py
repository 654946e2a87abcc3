"""Checks of values from outside: arguments, options, model files. Errors name the given value and the allowed ones."""

import sys
from collections.abc import Collection
from importlib.util import find_spec
from math import inf

_LARGEST = sys.float_info.max
_SHOWN = 80  # characters of a wrong value that a message repeats
_LONGEST = 2000  # characters of a message about a file, which may hold a value of any length


class ConfigError(ValueError):
    """Model files or settings that are invalid or not supported. A long message is cut."""

    def __init__(self, message: str) -> None:
        super().__init__(message if len(message) <= _LONGEST else message[: _LONGEST - 3] + "...")


def check_int(name: str, value: object, low: int, high: int | None = None) -> int:
    """Return `value` if it is an integer from `low` to `high`. True and False are not integers here."""
    if isinstance(value, bool) or not isinstance(value, int) or value < low or (high is not None and value > high):
        raise invalid(name, f"an integer from {low}" + ("" if high is None else f" to {high}"), value)
    return value


def check_number(
    name: str, value: object, low: float = -inf, high: float = inf, *, above: bool = False, below: bool = False
) -> float:
    """Return `value` if it is a number from `low` to `high` that a float can hold. `above` excludes `low`, `below`
    excludes `high`."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        fits = low <= value <= high and abs(value) <= _LARGEST  # NaN is in no range
        if fits and not (above and value == low) and not (below and value == high):
            return value
    parts = [] if low == -inf else [f"{'above' if above else 'from'} {low}"]
    parts += [] if high == inf else [f"{'and below' if below else 'and at most' if above else 'to'} {high}"]
    raise invalid(name, " ".join(["a number", *parts] if parts else ["a finite number"]), value)


def check_bool(name: str, value: object) -> bool:
    """Return `value` if it is True or False."""
    if not isinstance(value, bool):
        raise invalid(name, "true or false", value)
    return value


def check_choice(name: str, value: object, allowed: Collection[str]) -> str:
    """Return `value` if it is one of the allowed names."""
    if not isinstance(value, str) or value not in allowed:
        raise invalid(name, f"one of {', '.join(allowed)}", value)
    return value


def has_extras(package: str) -> bool:
    """Whether a phase has its folder of extras."""
    return find_spec(f"{package}.extras") is not None


def check_extras(package: str, what: str) -> None:
    """ConfigError if `what` was asked for and the phase lacks the extras that it needs."""
    if not has_extras(package):
        raise ConfigError(f"{what} needs {package}/extras, which is not here")


def invalid(name: str, allowed: str, given: object) -> ValueError:
    """The error for a wrong value: "{name} must be {allowed}, got {given}". A long value is shortened."""
    huge = isinstance(given, int) and given.bit_length() > 256  # Python refuses to print the largest integers
    shown = "a far larger number" if huge else repr(given)
    return ValueError(f"{name} must be {allowed}, got {shown if len(shown) <= _SHOWN else shown[: _SHOWN - 3] + '...'}")

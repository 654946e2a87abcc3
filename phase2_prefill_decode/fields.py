"""Checks of configuration values. A ConfigError names the value given and the values allowed."""

from math import inf

MAX_LENGTH = 1 << 24  # tokens; longer than any context in use
MAX_MESSAGE = 2000  # characters; a file may hold a value of any length


class ConfigError(ValueError):
    """A configuration that is invalid or not supported. A long message is cut."""

    def __init__(self, message: str) -> None:
        super().__init__(message if len(message) <= MAX_MESSAGE else message[: MAX_MESSAGE - 3] + "...")


def integer(name: str, value: object, low: int, high: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ConfigError(f"{name} must be an integer from {low} to {high}, got {value!r}")
    return value


def number(name: str, value: object, low: float, *, open_below: bool = False) -> None:
    """Check for a finite number from `low` on, or above it."""
    fits = isinstance(value, int | float) and not isinstance(value, bool) and low <= value < inf  # no NaN either
    if not fits or (open_below and value == low):
        raise ConfigError(f"{name} must be a number {'above' if open_below else 'from'} {low}, got {value!r}")


def flag(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise ConfigError(f"{name} must be true or false, got {value!r}")
    return value


def one_of(name: str, value: object, allowed: tuple[str, ...]) -> str:
    if not isinstance(value, str) or value not in allowed:
        raise ConfigError(f"{name} must be one of {', '.join(allowed)}, got {value!r}")
    return value

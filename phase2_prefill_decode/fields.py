"""Checks of what a configuration is made of. A ConfigError says what was given and what is allowed."""

from math import inf


class ConfigError(ValueError):
    """A configuration that this engine does not run, or that no model could have."""


def integer(name: str, value: object, low: int, high: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ConfigError(f"{name} must be an integer from {low} to {high}, got {value!r}")
    return value


def number(name: str, value: object, low: float, *, open_below: bool = False) -> None:
    """A finite number from `low`, or above it."""
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

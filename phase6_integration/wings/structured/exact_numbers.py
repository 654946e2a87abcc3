"""Numbers of a JSON schema that llguidance would change, since it reads each as a 64-bit float, are refused.

{"const": 1234567890123456789} would allow 1234567890123456768 and nothing else: a 400; as a string it is kept.
"""

import math
from collections.abc import Iterator, Mapping
from decimal import Decimal
from typing import Any

MAPS = {"properties", "patternProperties", "$defs", "definitions"}  # of names to schemas
VALUES = {"const", "enum", "default", "examples"}  # no schemas
KEYWORDS = {"const", "enum", "minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum"}
EXACT = 1 << 53  # floats have each integer up to here
POWERS = 22  # of ten, which floats have
LARGEST = (1 << 63) - 1  # integer of llguidance, which it takes for larger ones: a maximum from there on excludes none


def check_numbers(schema: Any) -> None:
    """ValueError for a value of const or enum that would be another, and for a bound that would be moved."""
    for part in _schemas(schema):
        for keyword in KEYWORDS & part.keys():
            for number in _numbers(part[keyword]):
                if not _is_kept(number, keyword):
                    raise ValueError(f"{keyword}: {str(number)[:40]} has too many digits to be enforced")


def _schemas(value: Any) -> Iterator[Mapping[str, Any]]:
    """All schemas in a schema, itself included."""
    if isinstance(value, list):
        for item in value:
            yield from _schemas(item)
    elif isinstance(value, dict):
        yield value
        for name, inner in value.items():
            if name in MAPS and isinstance(inner, dict):
                yield from _schemas([*inner.values()])
            elif name not in VALUES:
                yield from _schemas(inner)


def _numbers(value: Any) -> Iterator[float]:
    """All numbers in a value."""
    if isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _numbers(item)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield value


def _is_kept(number: float, keyword: str) -> bool:
    """Whether a number survives a conversion to a float that multiplies digits by a power of ten."""
    if not math.isfinite(number):
        return False
    if isinstance(number, float):
        digits, exponent = Decimal(repr(number)).as_tuple()[1:]
        return int("".join(map(str, digits))) <= EXACT and abs(int(exponent)) <= POWERS
    beside = keyword.startswith("exclusive")  # then the integer beside the bound is the one that counts
    return abs(number) + beside <= EXACT or (keyword.endswith("aximum") and number - beside >= LARGEST)

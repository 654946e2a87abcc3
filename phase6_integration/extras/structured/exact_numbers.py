"""Refuses the numbers of a JSON schema that llguidance would change, since it reads each as a 64-bit float.

{"const": 1234567890123456789} would allow 1234567890123456768 and nothing else: a 400; as a string it is kept.
"""

import math
from decimal import Decimal
from typing import Any

VALUES = {"const", "enum"}
NOTES = {"default", "examples"}  # values that exclude nothing
MAPS = {"properties", "patternProperties", "$defs", "definitions"}  # of names to schemas
KEYWORDS = VALUES | {"multipleOf", "minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum"}
EXACT = 1 << 53  # floats have each integer up to here
POWERS = 22  # of ten, which floats have
LARGEST = (1 << 63) - 1  # integer of llguidance, which it takes for larger ones: a maximum from there on excludes none


def check_numbers(schema: Any, keyword: str = "") -> None:
    """ValueError for a value of const or enum that would change, and for a bound that would move. `keyword`: the one
    that has this value, or contains it."""
    if isinstance(schema, dict):
        for name, inner in schema.items():
            if keyword in VALUES or keyword in MAPS:
                check_numbers(inner, keyword if keyword in VALUES else "")
            elif name not in NOTES:
                check_numbers(inner, name)
    elif isinstance(schema, list):
        for item in schema:
            check_numbers(item, keyword)
    elif isinstance(schema, int | float) and keyword in KEYWORDS and not _is_kept(schema, keyword):
        raise ValueError(f"{keyword}: {str(schema)[:40]} has too many digits to be enforced")


def _is_kept(number: float, keyword: str) -> bool:
    """Whether a number survives a conversion to a float that multiplies digits by a power of ten."""
    if isinstance(number, float):
        if not math.isfinite(number):
            return False
        digits, exponent = Decimal(repr(number)).as_tuple()[1:]
        return int("".join(map(str, digits))) <= EXACT and abs(int(exponent)) <= POWERS
    beside = keyword.startswith("exclusive")  # then the integer beside the bound is the one that counts
    return abs(number) + beside <= EXACT or (keyword.endswith("aximum") and number - beside >= LARGEST)

"""Numbers of a JSON schema that llguidance would change, since it reads each of them as a 64-bit float.

    {"type": "object", "properties": {"id": {"const": 1234567890123456789}}} -> a grammar in Lark with that text in it

What leads to such a value of `const` or `enum` is written in Lark, with the value as literal text; all other parts stay
JSON schemas in it. A bound that would be moved is refused.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from decimal import Decimal
from typing import Any
from urllib.parse import unquote

MAPS = {"properties", "patternProperties", "$defs", "definitions"}  # of names to schemas
DEFINITIONS = {"$defs", "definitions"}
ABOUT = {*DEFINITIONS, "$schema", "$comment", "title", "description", "default", "examples", "x-guidance"}
BLANK = r"[\x20\x0A\x0D\x09]+"  # llguidance's default
EXACT = 1 << 53  # floats have each integer up to here
POWERS = 22  # of ten, which floats have
LARGEST = (1 << 63) - 1  # integer of llguidance, which it takes for larger ones
LONG_VALUES = "a number of so many digits may be in const or enum in properties, items, anyOf and $defs"
LONG = re.compile(r"[0-9][0-9.]{15}|[0-9][eE]")  # numbers in JSON are kept without 16 digits or an exponent
# A name in JSON, in its only spelling: a name that is taken has no other.
NAME = r'/"([^"\\\x00-\x1f\x7f]|\\["\\bfnrt])*"/'
TYPES: dict[str, type | tuple[type, ...]] = {
    "null": type(None),
    "boolean": bool,
    "string": str,
    "integer": int,
    "number": (int, float),
    "array": list,
    "object": dict,
}


def with_literals(schema: Mapping[str, Any]) -> str | None:
    """The grammar of a schema in Lark; None if llguidance keeps all its numbers. ValueError for a bound that would be
    moved, and for a value that no literal can stand for."""
    for part in _schemas(schema):
        _check_bounds(part)
    return None if all(map(_keeps_values, _schemas(schema))) else _Writer(schema).grammar()


def _schemas(value: Any) -> Iterator[dict[str, Any]]:
    """All schemas in a schema, itself included."""
    if isinstance(value, list):
        for one in value:
            yield from _schemas(one)
    elif isinstance(value, dict):
        yield value
        for name, inner in value.items():
            if name in MAPS and isinstance(inner, dict):
                yield from _schemas([*inner.values()])
            elif name not in ("const", "enum", "default", "examples"):
                yield from _schemas(inner)


def _keeps_values(schema: Mapping[str, Any]) -> bool:
    return _is_kept([schema.get("const"), schema.get("enum")])


def _is_kept(value: Any) -> bool:
    """Whether all numbers in a value survive a conversion to a float that multiplies digits by a power of ten."""
    if isinstance(value, dict | list):
        return all(map(_is_kept, value.values() if isinstance(value, dict) else value))
    if isinstance(value, int):
        return abs(value) <= EXACT
    if not isinstance(value, float):
        return True
    digits, exponent = Decimal(repr(value)).as_tuple()[1:]
    return int("".join(map(str, digits))) <= EXACT and abs(int(exponent)) <= POWERS


def _check_bounds(schema: Mapping[str, Any]) -> None:
    for keyword in ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum"):
        bound = schema.get(keyword)
        if isinstance(bound, int | float) and not isinstance(bound, bool) and not _keeps_bound(keyword, bound):
            raise ValueError(f"{keyword}: {str(bound)[:40]} has too many digits to be enforced")


def _keeps_bound(keyword: str, bound: float) -> bool:
    """Whether a bound excludes what it should: by the nearest float, plus or minus 1 where itself is excluded."""
    if isinstance(bound, float):
        if not _is_kept(bound) or not bound.is_integer():
            return _is_kept(bound)
        bound = int(bound)
    beside = 1 if keyword.startswith("exclusive") else 0
    if keyword.endswith("aximum") and bound - beside >= LARGEST:
        return True
    return abs(bound) + beside <= EXACT or (not beside and abs(bound) < LARGEST and float(bound) == bound)


class _Writer:
    """Writes one schema in Lark."""

    def __init__(self, schema: Mapping[str, Any]) -> None:
        self._schema = {name: value for name, value in schema.items() if name not in {*DEFINITIONS, "x-guidance"}}
        self._definitions = {name: schema[name] for name in DEFINITIONS & schema.keys()}
        self._guidance = schema.get("x-guidance", {})
        self._rules: list[str] = []
        self._named: dict[str, str] = {}  # the rule of each reference

    def grammar(self) -> str:
        if self._guidance.keys() - {"whitespace_pattern", "whitespace_flexible"}:
            raise ValueError("x-guidance with other keys than those of white space")
        pattern = self._guidance.get("whitespace_pattern")
        if pattern is None and self._guidance.get("whitespace_flexible", True):
            pattern = BLANK
        blank = [] if pattern is None else ['%llguidance {"ignore_once": true}', f"%ignore /{pattern}/"]
        start = f"start: {self._value(self._schema)}"
        return "\n".join([*blank, start, *self._rules])

    def _value(self, schema: Any) -> str:
        """What is of this schema, as an expression. A reference is a rule: each definition is written once."""
        named = {name: value for name, value in schema.items() if name not in ABOUT} if isinstance(schema, dict) else {}
        if named.keys() == {"$ref"}:
            return self._reference(str(named["$ref"]))
        if self._keeps(schema):
            return self._json(schema)
        match named:
            case {"anyOf": list(options), **rest} if not rest:
                return _either(self._value(option) for option in options)
            case {"const": value, **rest} if not rest.keys() - {"type"}:
                return _literals([value], rest.get("type"))
            case {"enum": list(values), **rest} if not rest.keys() - {"type"}:
                return _literals(values, rest.get("type"))
            case {"type": "object", **rest} if not rest.keys() - {"properties", "required", "additionalProperties"}:
                return self._object(rest)
            case {"type": "array", **rest} if not rest.keys() - {"items", "minItems", "maxItems"}:
                return self._array(rest)
        raise ValueError(f"{', '.join(sorted(schema.keys() - ABOUT))} cannot be enforced together: {LONG_VALUES}")

    def _keeps(self, schema: Any) -> bool:
        """Whether llguidance keeps every value of const and enum, also in what the schema refers to."""
        return all(_keeps_values(part) for one in (schema, *self._referred(schema).values()) for part in _schemas(one))

    def _referred(self, schema: Any) -> dict[str, Any]:
        """The definitions that a schema refers to, themselves or by others of them, by the references."""
        found, todo = dict[str, Any](), [schema]
        while todo:
            for part in _schemas(todo.pop()):
                reference = part.get("$ref")
                if reference is not None and reference not in found:
                    found[reference] = self._target(reference)
                    todo.append(found[reference])
        return found

    def _json(self, schema: Any) -> str:
        whole = {"allOf": [schema]} if isinstance(schema, bool) else schema
        needed = [id(definition) for definition in self._referred(schema).values()]
        definitions = {
            kind: {name: one for name, one in of.items() if id(one) in needed} for kind, of in self._definitions.items()
        }
        return "%json " + json.dumps({**whole, **(definitions if needed else {}), "x-guidance": self._guidance})

    def _reference(self, reference: str) -> str:
        if reference not in self._named:
            name = self._named[reference] = f"definition_{len(self._named)}"
            self._rules.append(f"{name}: {self._value(self._target(reference))}")
        return self._named[reference]

    def _target(self, reference: str) -> Any:
        """The definition that a reference leads to."""
        kind, _, name = reference.removeprefix("#/").partition("/")
        found = self._definitions.get(kind, {}).get(unquote(name).replace("~1", "/").replace("~0", "~"))
        if found is None:
            raise ValueError(f"a $ref must lead to one of $defs, got {reference[:40]}: {LONG_VALUES}")
        return found

    def _object(self, schema: Mapping[str, Any]) -> str:
        """The properties in their order, then others that are required, then any others."""
        others, required = schema.get("additionalProperties", True), schema.get("required", [])
        if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
            raise TypeError
        properties = {**schema.get("properties", {})}
        for name in required:
            properties.setdefault(name, others)
        members = [(f'{_text(name)} ":" {self._value(of)}', name in required) for name, of in properties.items()]
        if others is not False:
            free = f"FREE_{len(self._rules)}"
            self._rules.append(" & ~".join([f"{free}: {NAME}", *map(_text, properties)]))
            other = self._rule(f'{free} ":" {self._value(others)}')
            members.append((f'{other} ("," {other})*', False))
        first, more = ['""'], '""'  # what may begin with one of the members so far, and what follows the one before
        for member, must in reversed(members):
            begun = f"{self._rule(member)} {more}"
            first = [begun] if must else [begun, *first]
            more = self._rule(f'"," {begun}' if must else f'"," {begun} | {more}')
        return f'"{{" {_either(first)} "}}"'

    def _array(self, schema: Mapping[str, Any]) -> str:
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        if not all(type(bound) is int and bound >= 0 for bound in (least, 0 if most is None else most)):
            raise ValueError("minItems and maxItems are whole numbers from 0")
        if most is not None and most < least:
            raise ValueError(f"the schema cannot be met: minItems is {least} and maxItems {most}")
        if most == 0:
            return '"[" "]"'
        item = self._rule(self._value(schema.get("items", True)))
        some = f'{item} ("," {item}){{{max(least - 1, 0)},{"" if most is None else most - 1}}}'
        return f'"[" ({some}){"" if least else "?"} "]"'

    def _rule(self, expression: str) -> str:
        """The name of a new rule."""
        name = f"rule_{len(self._rules)}"
        self._rules.append(f"{name}: {expression}")
        return name


def _either(options: Iterable[str]) -> str:
    return f"({' | '.join(options)})"


def _text(value: Any) -> str:
    """The text of a value in JSON, in Lark."""
    return json.dumps(json.dumps(value, ensure_ascii=False))


def _literals(values: list[Any], types: Any) -> str:
    """Those of the values that have one of the types."""
    named = [types] if isinstance(types, str) else types
    found = [value for value in values if named is None or any(_is(value, name) for name in named)]
    if not found:
        raise ValueError("the schema cannot be met: no value of const or enum has its type")
    return _either(map(_literal, found))


def _is(value: Any, name: str) -> bool:
    """Whether a value has a type of JSON schema."""
    if isinstance(value, bool):
        return name == "boolean"
    return isinstance(value, TYPES[name]) or (name == "integer" and isinstance(value, float) and value.is_integer())


def _literal(value: Any) -> str:
    """The text of a value, with white space wherever JSON has it."""
    comma = ' "," '
    if isinstance(value, dict):
        members = comma.join(f'{_text(name)} ":" {_literal(of)}' for name, of in value.items())
        return f'"{{" {members} "}}"'
    return f'"[" {comma.join(map(_literal, value))} "]"' if isinstance(value, list) else _text(value)

"""A JSON schema as people write it, rewritten for llguidance, which refuses each keyword that it cannot enforce.

Some keywords are expressed in another way: {"format": "uuid4"} becomes a pattern, `propertyNames` patternProperties.
Others are left out and noted: the answer has a header that lists them. A schema with `strict: false` loses everything
that llguidance does not have. Dates, times and integers are limited to what clients can read: no year 0000, no second
60, no integer of 300 digits.
"""

import re
from collections.abc import Mapping
from typing import Any

MAPS = {"properties", "patternProperties", "$defs", "definitions"}  # of names to schemas
LISTS = {"anyOf", "oneOf", "allOf", "prefixItems"}
SCHEMAS = {"items", "additionalProperties"}
# These are left out of every schema, and noted. A schema that is not strict may have those of LENIENT too.
DECODED = {"contentEncoding", "contentMediaType", "contentSchema"}
LENIENT = {
    *("not", "if", "then", "else", "contains", "minContains", "maxContains", "dependentRequired", "dependentSchemas"),
    *("dependencies", "unevaluatedItems", "unevaluatedProperties", "additionalItems"),
}
LOOKAROUND = re.compile(r"\\[1-9BkpP]|\(\?[=!<]")  # and references back
INTEGER = 9 * 10**18  # as in 64 bits
MAX_SCHEMAS = 1 << 15  # within one: they take a tenth of a second
MAX_NAMES = 1 << 18  # characters of patterns for `propertyNames`, which may refer to one long list many times

_YEAR = r"(?:[0-9]{3}[1-9]|[0-9]{2}[1-9][0-9]|[0-9][1-9][0-9]{2}|[1-9][0-9]{3})"
_LEAP = r"(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_DAY = r"(?:(?:0[1-9]|1[0-2])-(?:0[1-9]|1[0-9]|2[0-8])|(?:0[13-9]|1[0-2])-(?:29|30)|(?:0[13578]|1[02])-31)"
_DATE = f"(?:{_YEAR}-{_DAY}|{_LEAP}-02-29)"
_TIME = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,6})?(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
_HOURS = r"T(?:{0}H(?:{0}M(?:{0}S)?)?|{0}M(?:{0}S)?|{0}S)".replace("{0}", "[0-9]{1,6}")
_DAYS = r"(?:{0}Y(?:{0}M(?:{0}D)?)?|{0}M(?:{0}D)?|{0}D)".replace("{0}", "[0-9]{1,6}")
_HEX = "[0-9a-f]"
FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "duration": f"P(?:{_DAYS}(?:{_HOURS})?|{_HOURS}|[0-9]{{1,6}}W)",
    **{f"uuid{v}": f"{_HEX}{{8}}-{_HEX}{{4}}-{v}{_HEX}{{3}}-[89ab]{_HEX}{{3}}-{_HEX}{{12}}" for v in range(1, 9)},
    "base64": "(?:[A-Za-z0-9+/]{4})*(?:[A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?",
    "base64url": "(?:[A-Za-z0-9_-]{4})*(?:[A-Za-z0-9_-]{2}==|[A-Za-z0-9_-]{3}=)?",
}
# Formats of pydantic and OpenAPI that stay any text.
NOTED = {
    *("binary", "byte", "password", "path", "file-path", "directory-path", "regex", "multi-host-uri", "json-string"),
    *("ipvanyaddress", "ipvanyinterface", "ipvanynetwork", "ipv4network", "ipv6network", "ipv4interface"),
    *("ipv6interface", "color", "fraction", "zoneinfo", "uri-template", "iri", "iri-reference", "idn-email"),
    *("idn-hostname", "uri-reference", "json-pointer", "relative-json-pointer", "phone", "hostname-port"),
}
KNOWN = {*FORMATS, "uuid", "email", "hostname", "ipv4", "ipv6", "uri"}  # to llguidance, or here
_NUMBERS = {"int32", "int64", "float", "double", "decimal"}  # formats of OpenAPI, for what is no text


class Rewrite:
    """One schema. `notes` are the keywords that are not enforced, without any of the client's text."""

    def __init__(self, schema: Mapping[str, Any], lenient: bool = False, closes: bool = False) -> None:
        """`closes`: an object that lists its properties has no others, unless it says so. ValueError for a schema that
        is too large."""
        self._whole, self._lenient, self._closes = schema, lenient, closes
        self._notes = set[str]()
        self._schemas = self._characters = 0
        self._patterns: dict[str, str | None] = {}  # of the names that a reference allows
        self.schema: dict[str, Any] = self._rewritten(schema)

    @property
    def notes(self) -> tuple[str, ...]:
        return tuple(sorted(self._notes))

    def _rewritten(self, schema: Any) -> Any:
        if not isinstance(schema, dict):
            return schema
        self._schemas += 1
        if self._schemas > MAX_SCHEMAS:
            raise ValueError(f"a schema may have at most {MAX_SCHEMAS} others in it")
        made = {name: self._value(name, value) for name, value in schema.items()}
        for name in made.keys() & (DECODED | (LENIENT if self._lenient else set())):
            self._leave_out(made, name)
        if made.get("uniqueItems") is True and made.get("maxItems") not in (0, 1):
            self._notes.add("uniqueItems")
        if isinstance(made.get("uniqueItems"), bool):
            del made["uniqueItems"]
        if self._lenient and "oneOf" in made and "anyOf" not in made:
            made["anyOf"] = made.pop("oneOf")
            self._notes.add("oneOf")
        self._string(made)
        if "propertyNames" in made:
            self._property_names(made)
        if self._closes and "properties" in made and not made.keys() & {"additionalProperties", "patternProperties"}:
            made["additionalProperties"] = False
        if made.get("type") == "integer" and not made.keys() & {"enum", "const"}:
            _bound(made)
        return made

    def _value(self, name: str, value: Any) -> Any:
        """The value of a keyword, with the schemas in it rewritten."""
        if name in MAPS and isinstance(value, dict):
            return {key: self._rewritten(inner) for key, inner in value.items()}
        if isinstance(value, list) and (name in LISTS or name == "items"):
            return [self._rewritten(inner) for inner in value]
        return self._rewritten(value) if name in SCHEMAS else value

    def _leave_out(self, schema: dict[str, Any], name: str, note: str = "") -> None:
        del schema[name]
        self._notes.add(note or name)

    def _string(self, schema: dict[str, Any]) -> None:
        """Formats and patterns of strings."""
        format, pattern = schema.get("format"), schema.get("pattern")
        if isinstance(pattern, str):
            if self._lenient and LOOKAROUND.search(pattern):
                self._leave_out(schema, "pattern")
            else:
                schema["pattern"] = self._without_boundaries(pattern)
        if not isinstance(format, str):
            return
        if format in FORMATS and "pattern" not in schema:
            schema["pattern"] = f"^(?:{FORMATS[schema.pop('format')]})$"
        elif format.startswith("uuid") and format in FORMATS:
            schema["format"] = "uuid"
        elif format in NOTED:
            self._leave_out(schema, "format", f"format {format}")
        elif format in _NUMBERS or (self._lenient and format not in KNOWN):
            self._leave_out(schema, "format")

    def _without_boundaries(self, pattern: str) -> str:
        r"""A pattern without \b, which is true where a pattern begins or ends with a letter, and noted elsewhere."""
        if r"\b" not in pattern:
            return pattern
        if match := re.fullmatch(r"\\b(\w[^\\|]*\w|\w)\\b", pattern):
            return rf"(?s)^(?:.*\W)?{match[1]}(?:\W.*)?$"
        bare = re.sub(r"\\(.)", lambda escape: "" if escape[1] == "b" else escape[0], pattern)
        if bare != pattern:
            self._notes.add(r"pattern \b")
        return bare

    def _property_names(self, schema: dict[str, Any]) -> None:
        """`propertyNames` of an object that lists no properties, as the pattern of all that it has."""
        names = schema["propertyNames"]
        if isinstance(names, dict) and isinstance(reference := names.get("$ref"), str):
            if reference not in self._patterns:
                self._patterns[reference] = self._pattern_of(self._target(reference))
            pattern = self._patterns[reference]
        else:
            pattern = self._pattern_of(names)
        self._characters += len(pattern or "")
        if self._characters > MAX_NAMES:
            raise ValueError(f"propertyNames may come to at most {MAX_NAMES} characters")
        if pattern is None or schema.keys() & {"properties", "patternProperties", "$ref", "allOf"}:
            self._leave_out(schema, "propertyNames")
            return
        del schema["propertyNames"]
        schema["patternProperties"] = {pattern: schema.get("additionalProperties", True)}
        schema["additionalProperties"] = False

    def _pattern_of(self, names: Any) -> str | None:
        return _pattern_of(self._rewritten(names)) if isinstance(names, dict) else ".*" if names is True else None

    def _target(self, reference: str) -> Any:
        """What a reference within the schema refers to; None for any other reference."""
        kind, _, name = reference.removeprefix("#/").partition("/")
        definitions = self._whole.get(kind)
        return definitions.get(name) if isinstance(definitions, dict) and kind in MAPS else None


def _pattern_of(names: Mapping[str, Any]) -> str | None:
    """A pattern of the texts that meet a schema; None if it cannot be written as one."""
    listed = [names["const"]] if "const" in names else names.get("enum")
    if isinstance(listed, list):
        return f"^(?:{'|'.join(re.escape(name) for name in listed if isinstance(name, str))})$"
    if isinstance(pattern := names.get("pattern"), str):
        return pattern
    low, high = names.get("minLength", 0), names.get("maxLength", "")
    plain = names.keys() <= {"type", "title", "description", "minLength", "maxLength"}
    return f"(?s)^.{{{low},{high}}}$" if plain else None


def _bound(schema: dict[str, Any]) -> None:
    """Bound an integer where it is not."""
    bounds = [schema[name] for name in ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum") if name in schema]
    if any(not isinstance(bound, int | float) or abs(bound) >= INTEGER for bound in bounds):
        return
    if not schema.keys() & {"minimum", "exclusiveMinimum"}:
        schema["minimum"] = -float(INTEGER)
    if not schema.keys() & {"maximum", "exclusiveMaximum"}:
        schema["maximum"] = float(INTEGER)

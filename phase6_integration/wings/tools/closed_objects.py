"""Closed objects: a function has the parameters that it lists, whether or not its schema forbids others.

A model may add properties that a schema leaves open until its tokens are used up, and some clients take
`additionalProperties` away.
"""

from typing import Any

MAPS = {"properties", "$defs", "definitions"}  # of names to schemas
LISTS = {"anyOf", "oneOf", "prefixItems"}
ONE = {"items", "additionalProperties"}
BRANCHES = {"anyOf", "oneOf", "$ref"}
# With these, one part of a schema may need a property that only another part lists.
COMBINING = {
    *("allOf", "not", "if", "dependentRequired", "dependentSchemas", "dependencies", "$dynamicRef"),
    *("patternProperties", "propertyNames", "unevaluatedProperties", "minProperties"),
}


class _CombinedError(Exception):
    """An object may have to meet several schemas."""


def closed(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema with `additionalProperties: false` in each object that lists its properties and says nothing of
    others; the schema as it is if an object may have to meet several."""
    try:
        return _closed(schema)
    except _CombinedError:
        return schema


def _closed(schema: dict[str, Any]) -> dict[str, Any]:
    listed, required = schema.get("properties"), schema.get("required", [])
    branches = BRANCHES & schema.keys() and (listed or required)
    if branches or COMBINING & schema.keys() or _needs_more(listed, required):
        raise _CombinedError
    result = {name: _inner(name, value) for name, value in schema.items()}
    return {"additionalProperties": False, **result} if isinstance(listed, dict) else result


def _needs_more(listed: Any, required: Any) -> bool:
    """Whether a property is required that is not listed."""
    names = listed if isinstance(listed, dict) else {}
    return not isinstance(required, list) or any(not isinstance(name, str) or name not in names for name in required)


def _inner(name: str, value: Any) -> Any:
    """The value of a keyword, with the schemas in it closed."""
    if name in MAPS and isinstance(value, dict):
        return {key: _inner("items", schema) for key, schema in value.items()}
    if name in LISTS and isinstance(value, list):
        return [_inner("items", schema) for schema in value]
    return _closed(value) if name in ONE and isinstance(value, dict) else value

"""Closed objects: what a closed schema allows, its schema allows too; values of listed properties stay allowed."""

from typing import Any, Literal

import jsonschema
import pytest
from pydantic import BaseModel

from phase6_integration.wings.tools.closed_objects import closed

NAME = {"properties": {"name": {"type": "string"}}}
A_NAME, A_NAME_AND_MORE = {"name": "Bern"}, {"name": "Bern", "other": 1}


class Place(BaseModel):
    name: str


class Trip(BaseModel):
    stops: list[Place]
    by: Place | Literal["train"] | None = None
    notes: dict[str, Place] = {}


def allows(schema: dict[str, Any], value: Any) -> bool:
    return bool(jsonschema.Draft202012Validator(schema).is_valid(value))


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        (NAME, A_NAME, A_NAME_AND_MORE),
        ({"properties": {}}, {}, A_NAME),
        ({"type": "array", "items": NAME}, [A_NAME], [A_NAME_AND_MORE]),
        ({"anyOf": [NAME, {"type": "null"}]}, A_NAME, A_NAME_AND_MORE),
        ({"properties": {"properties": NAME}}, {"properties": A_NAME}, {"properties": A_NAME_AND_MORE}),
        (Trip.model_json_schema(), {"stops": [A_NAME], "by": A_NAME}, {"stops": [A_NAME_AND_MORE]}),
        (Trip.model_json_schema(), {"stops": [], "notes": {"any": A_NAME}}, {"stops": [], "notes": {"any": {"x": 1}}}),
    ],
)
def test_an_object_has_the_properties_that_are_listed(schema: dict[str, Any], right: Any, wrong: Any) -> None:
    found = closed(schema)
    assert allows(found, right)
    assert not allows(found, wrong)


@pytest.mark.parametrize(
    "schema",
    [
        {**NAME, "additionalProperties": True},
        {**NAME, "additionalProperties": {"type": "integer"}},
        {"type": "object", "additionalProperties": {"type": "integer"}},
        {"type": "object"},
        {"enum": [{"properties": {}}], "default": {"properties": {}}},
        {"allOf": [NAME, {"properties": {"age": {}}}]},
        {**NAME, "anyOf": [{"required": ["other"]}, {"required": ["name"]}]},
        {"required": ["other"], "anyOf": [NAME]},
        {"$ref": "#/$defs/a", "required": ["other"], "$defs": {"a": NAME}},
        {**NAME, "required": ["name", "other"]},
        {**NAME, "patternProperties": {"^o": {}}},
        {**NAME, "minProperties": 2},
        {"properties": {"a": {"if": NAME, "then": {"required": ["other"]}}}},
    ],
)
def test_what_is_said_of_others_or_in_several_schemas_stays(schema: dict[str, Any]) -> None:
    for value in (A_NAME, A_NAME_AND_MORE, {"other": 1}, 1):
        assert allows(closed(schema), value) == allows(schema, value)


@pytest.mark.parametrize(
    "schema",
    [{"required": [["a"]]}, {"required": True}, {"properties": [1]}, {"anyOf": 5}, {"$defs": 5}, {"items": [{}]}],
)
def test_what_is_no_schema_stays_for_the_check_of_grammars(schema: dict[str, Any]) -> None:
    assert closed(schema) == schema

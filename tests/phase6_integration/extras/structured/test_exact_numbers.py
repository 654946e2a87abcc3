"""Numbers of a JSON schema that have more digits than a float: as given in every answer, or a 400 that names them.

What an answer may be is judged by jsonschema, on integers of Python.
"""

import json
from typing import Any

import jsonschema
import pytest

from phase6_integration.extras.structured.output_grammar import json_grammar
from tests.phase6_integration.cities import TOKENIZER, refused, schema_format
from tests.phase6_integration.extras.structured.test_structured import walk
from tests.phase6_integration.posting import COMPLETE, PROMPT, error_of, post

LONG = 1234567890123456789


@pytest.mark.parametrize("value", [2**53, -(2**53), 0.1, 1e22, -1.5, 1e-7, 0, True, 1234567890.125], ids=str)
def test_a_number_is_answered_as_it_was_given(value: float) -> None:
    for schema in ({"const": value}, {"type": ["number", "boolean"], "enum": [value]}):
        text, done = walk(json_grammar(schema), seed=0, most=400)
        assert done
        assert json.loads(text) == value


DEEP: dict[str, Any] = {"anyOf": [{"const": [1, {"id": [LONG]}]}]}
LOST: list[tuple[dict[str, Any], str]] = [
    ({"const": LONG}, f"const: {LONG}"),
    ({"enum": ["word", -LONG]}, f"enum: {-LONG}"),
    ({"const": (1 << 53) + 1}, "const: 9007199254740993"),
    ({"const": 123456789.12345679}, "const: 123456789.12345679"),
    (DEEP, f"const: {LONG}"),
    ({"$defs": {"a": DEEP}, "properties": {"b": {"items": {"$ref": "#/$defs/a"}}}}, f"const: {LONG}"),
    ({"type": "integer", "minimum": LONG}, f"minimum: {LONG}"),
    ({"properties": {"minimum": {"type": "integer", "maximum": -LONG}}}, f"maximum: {-LONG}"),
    ({"$defs": {"a": {"exclusiveMinimum": 1 << 53}}, "items": {"$ref": "#/$defs/a"}}, f"exclusiveMinimum: {1 << 53}"),
    ({"anyOf": [{"type": "integer", "exclusiveMaximum": (1 << 63) - 1}]}, f"exclusiveMaximum: {(1 << 63) - 1}"),
    ({"type": "integer", "minimum": -(1 << 63)}, f"minimum: {-(1 << 63)}"),
    ({"minimum": 0.30000000000000004}, "minimum: 0.30000000000000004"),
    ({"type": "integer", "multipleOf": LONG}, f"multipleOf: {LONG}"),
    ({"type": "number", "maximum": 10**19}, "max=Some(1e19)"),
    ({"type": "number", "const": 10**400}, f"const: 1{'0' * 39}"),
]


@pytest.mark.parametrize(("schema", "words"), LOST, ids=[str(i) for i in range(len(LOST))])
def test_what_cannot_be_kept_is_refused_with_its_name_and_value(schema: dict[str, Any], words: str) -> None:
    answer = post(COMPLETE, {**PROMPT, **schema_format(schema)})
    assert answer.status_code == 400, answer.text
    error = error_of(answer)
    assert error["param"] == "response_format.json_schema.schema"
    assert words in error["message"]


@pytest.mark.parametrize(
    "grammar",
    [
        f'start: %json {{"const": {LONG}}}',
        f'start: x\nx: %json\n{{"minimum": {LONG}}}',
        json.dumps({"grammars": [{"lark_grammar": f'start: %json {{"const": {LONG}}}'}]}),
    ],
)
def test_a_json_schema_within_lark_is_held_to_the_same(grammar: str) -> None:
    assert "too many digits" in (refused(TOKENIZER, grammar) or "")


def test_a_long_number_that_is_no_value_stays() -> None:
    assert refused(TOKENIZER, f'start: "{LONG}" %json {{"const": 5}}') is None
    assert refused(TOKENIZER, json_grammar({"type": "string", "description": str(LONG), "default": LONG})) is None
    named: dict[str, Any] = {"const": {"type": "string", "default": {"minimum": LONG}}}
    assert refused(TOKENIZER, json_grammar({"properties": named, "examples": [{"const": LONG}]})) is None


KEPT = [("maximum", (1 << 63) - 1), ("maximum", (1 << 64) - 1), ("exclusiveMaximum", 1 << 63), ("minimum", -(1 << 53))]


@pytest.mark.parametrize(("keyword", "bound"), KEPT)
def test_a_long_bound_that_excludes_what_it_should_stays(keyword: str, bound: int) -> None:
    schema = {"type": "integer", "minimum": 0, "maximum": 9, keyword: bound}
    for seed in range(10):
        text, done = walk(json_grammar(schema), seed)
        assert done
        jsonschema.validate(json.loads(text), schema)


@pytest.mark.parametrize("number", ["1e999", "-1e999"])
def test_a_number_beyond_all_floats_is_refused_by_its_keyword(number: str) -> None:
    assert "const: " in (refused(TOKENIZER, f'start: %json {{"const": {number}}}') or "")


@pytest.mark.parametrize("form", ["[]", '{"grammars": 5}', '{"grammars": [5]}', '{"grammar": []}'])
def test_what_is_not_in_llguidances_form_is_refused(form: str) -> None:
    assert refused(TOKENIZER, form) is not None

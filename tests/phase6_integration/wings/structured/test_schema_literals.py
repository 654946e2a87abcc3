"""Numbers of a JSON schema that have more digits than a float: as given in every answer, or a 400.

What an answer may be is judged by jsonschema, on integers of Python.
"""

import json
import re
from random import Random
from typing import Any

import jsonschema
import pytest

from phase6_integration.wings.structured.grammar_checker import GrammarChecker, as_lark
from phase6_integration.wings.structured.output_grammar import json_grammar
from phase6_integration.wings.structured.schema_literals import with_literals
from tests.phase6_integration.cities import TOKENIZER, allows, schema_format
from tests.phase6_integration.fake_engine import FakeEngine
from tests.phase6_integration.posting import CHAT, COMPLETE, HELLO, PROMPT, error_of, post
from tests.phase6_integration.wings.structured.test_structured import walk

LONG = 1234567890123456789
CHECK = GrammarChecker(TOKENIZER)
EXTREMES = [
    *(LONG, -LONG, (1 << 53) + 1, (1 << 63) - 1, 1 << 63, -(1 << 63), (1 << 64) - 1, 10**30, 123456789.12345679),
    *(5e-324, 1.7976931348623157e308, 0.30000000000000004, 12345678901234.567, 2**53, 0.1, 1e22, -1.5, 1e-7, 0),
]


@pytest.mark.parametrize("value", EXTREMES, ids=str)
def test_a_number_is_answered_as_it_was_given(value: float) -> None:
    for schema in ({"const": value}, {"type": "number", "enum": [value]}):
        text, done = walk(CHECK(json_grammar(schema)), seed=0, most=400)
        assert done
        assert json.loads(text) == value


def number(random: Random) -> float:
    if random.random() < 0.3:
        return random.uniform(-1, 1) * 10.0 ** random.randint(-30, 30)
    return random.randint(-(10 ** random.randint(1, 24)), 10 ** random.randint(1, 24))


def values(random: Random) -> list[Any]:
    one = number(random)
    return random.sample([one, one + 1, number(random), "word", None, [one, {"deep": number(random)}], {"k": one}], 3)


def schema_of(random: Random, depth: int) -> dict[str, Any]:
    """A schema in which numbers of many digits are anywhere that they may be."""
    shape = random.choice(
        ["const", "enum", "ref", "object", "object", "array", "anyOf"] if depth else ["const", "enum"]
    )
    if shape == "const":
        return {"const": random.choice(values(random))}
    if shape == "enum":
        return {"enum": values(random)}
    if shape == "ref":
        return {"$ref": "#/$defs/shared"}
    if shape == "array":
        return {"type": "array", "items": schema_of(random, depth - 1), "minItems": random.randint(0, 2), "maxItems": 3}
    if shape == "anyOf":
        return {"anyOf": [schema_of(random, depth - 1), {"type": "boolean"}]}
    names = random.sample(["id", "a b", "naïve", 'a"b', "other"], 3)
    listed = {name: schema_of(random, depth - 1) for name in names[:2]}
    more = random.choice([{}, {"additionalProperties": False}, {"additionalProperties": schema_of(random, depth - 1)}])
    required = random.sample(names if "additionalProperties" not in more else names[:2], random.randint(0, 2))
    return {"type": "object", "title": "T", "properties": listed, "required": required, **more}


@pytest.mark.parametrize("seed", range(4))
def test_an_answer_meets_its_schema_of_long_numbers(seed: int) -> None:
    random, finished = Random(seed), 0
    for _ in range(25):
        schema = {**schema_of(random, depth=3), "$defs": {"shared": schema_of(random, depth=0)}}
        text, done = walk(CHECK(json_grammar(schema)), random.randrange(1000))
        finished += done
        if done:
            jsonschema.validate(json.loads(text), schema)
    assert finished > 15


TICKET: dict[str, Any] = {
    "type": "object",
    "properties": {
        "id": {"type": "integer", "enum": [LONG, "word", 7], "description": "of a ticket"},
        "parent": {"anyOf": [{"$ref": "#/$defs/ticket"}, {"type": "null"}]},
        "note": {"type": "string", "maxLength": 3},
    },
    "required": ["id"],
}
SCHEMA = {"type": "array", "items": {"$ref": "#/$defs/ticket"}, "$defs": {"ticket": TICKET}}
RIGHT = [
    "[]",
    f'[{{"id":{LONG}}}]',
    f'[{{"id": {LONG}, "parent": {{"id": 7}}, "note": "abc"}}, {{"id":7,"parent":null,"more":[{LONG - 1}]}}]',
    f'[\n  {{\n    "id": {LONG}\n  }}\n]',
]
WRONG = [
    f'[{{"id":{LONG - 21}}}]',
    '[{"id":"word"}]',
    "[{}]",
    '[{"note":"a","id":7}]',
    '[{"id":7,"id":8}]',
    '[{"id":7,"note":"four"}]',
    '[{"id":  7}]',
    ' [{"id":7}]',
    '[{"id":7}] ',
    '[{"id":7,}]',
    r'[{"id":7,"\u0069d":8}]',
]


def test_what_stands_around_a_long_number_is_enforced_as_ever() -> None:
    grammar = CHECK(json_grammar(SCHEMA))
    assert [text for text in RIGHT if not allows(grammar, text)] == []
    assert [text for text in WRONG if allows(grammar, text)] == []
    for text in RIGHT:
        jsonschema.validate(json.loads(text), SCHEMA)
    assert not allows(CHECK(json_grammar(SCHEMA, None)), RIGHT[2]), "white space is as it was asked for"


@pytest.mark.parametrize(
    "schema", [{"minimum": -1.5, "maximum": 10**15}, {"type": "string", "description": str(LONG), "default": LONG}]
)
def test_a_schema_whose_numbers_are_kept_stays_json(schema: dict[str, Any]) -> None:
    grammar = json_grammar(schema)
    assert json.loads(CHECK(grammar)) == json.loads(grammar)


LOST: list[tuple[dict[str, Any], str]] = [
    ({"type": "integer", "minimum": LONG}, f"minimum: {LONG}"),
    ({"properties": {"minimum": {"type": "integer", "maximum": -LONG}}}, f"maximum: {-LONG}"),
    ({"$defs": {"a": {"exclusiveMinimum": 1 << 53}}, "items": {"$ref": "#/$defs/a"}}, f"exclusiveMinimum: {1 << 53}"),
    ({"anyOf": [{"type": "integer", "exclusiveMaximum": (1 << 63) - 1}]}, f"exclusiveMaximum: {(1 << 63) - 1}"),
    ({"type": "integer", "minimum": -(1 << 63)}, f"minimum: {-(1 << 63)}"),
    ({"minimum": 0.30000000000000004}, "minimum: 0.30000000000000004"),
    ({"type": "integer", "multipleOf": LONG}, "'multipleOf' has too many digits"),
    ({"type": "number", "maximum": 10**19}, "max=Some(1e19)"),
    ({"allOf": [{"const": LONG}]}, "allOf"),
    ({"const": LONG, "minimum": 5}, "const, minimum"),
    ({"properties": {"a": {"const": LONG}, "b": {"$ref": "#"}}, "type": "object"}, "$ref"),
    ({"type": "string", "enum": [LONG]}, "cannot be met"),
]


@pytest.mark.parametrize(("schema", "words"), LOST, ids=[str(i) for i in range(len(LOST))])
def test_what_cannot_be_kept_is_refused_with_its_name_and_value(schema: dict[str, Any], words: str) -> None:
    answer = post(COMPLETE, {**PROMPT, **schema_format(schema)})
    assert answer.status_code == 400, answer.text
    error = error_of(answer)
    assert error["param"] == "response_format.json_schema.schema"
    assert words in error["message"]


def test_a_json_schema_within_lark_is_held_to_the_same() -> None:
    for grammar in (f'start: %json {{"const": {LONG}}}', f'start: x\nx: %json\n{{"minimum": {LONG}}}'):
        with pytest.raises(ValueError, match="too many digits"):
            CHECK(grammar)
    assert CHECK(f'start: "{LONG}" %json {{"const": 5}}')


KEPT = [("minimum", 1 << 60), ("maximum", (1 << 63) - 1), ("maximum", (1 << 64) - 1), ("exclusiveMaximum", 1 << 63)]


@pytest.mark.parametrize(("keyword", "bound"), KEPT)
def test_a_long_bound_that_excludes_what_it_should_stays(keyword: str, bound: int) -> None:
    other = {"minimum": 0} if keyword != "minimum" else {"maximum": (1 << 60) + 4096}
    schema = {"type": "integer", keyword: bound, **other}
    for seed in range(10):
        text, done = walk(CHECK(json_grammar(schema)), seed)
        assert done
        jsonschema.validate(json.loads(text), schema)


@pytest.mark.parametrize("broken", [{"required": "id"}, {"properties": []}, {"required": [5]}, {"minProperties": 1}])
def test_a_malformed_schema_of_long_numbers_is_refused(broken: dict[str, Any]) -> None:
    inner = {"type": "object", "properties": {"id": {"const": LONG}}, **broken}
    with pytest.raises(ValueError, match=r"schema|enforced"):
        CHECK(json_grammar({"type": "array", "items": inner, "description": {"const": LONG}}))


def test_the_arguments_of_a_call_have_long_numbers_too() -> None:
    parameters = {"type": "object", "properties": {"id": {"enum": [LONG, LONG + 1]}}, "required": ["id"]}
    tools = [{"type": "function", "function": {"name": "close", "parameters": parameters}}]
    engine = FakeEngine()
    answer = post(CHAT, {**HELLO, "tools": tools, "tool_choice": "required", "parallel_tool_calls": False}, engine)
    assert answer.status_code == 200, answer.text
    grammar = engine.submitted[0].params.grammar
    assert grammar is not None
    text, done = walk(grammar, seed=1)
    assert done
    assert re.search(f'"id": ?({LONG}|{LONG + 1})', text)


def test_each_definition_is_written_once_and_only_where_it_is_needed() -> None:
    """With a long number among them, all of them were written at each reference: a grammar of megabytes."""
    definitions: dict[str, Any] = {
        f"d{n}": {"type": "object", "properties": {"name": {"type": "string", "maxLength": 50 + n}}} for n in range(40)
    }
    properties: dict[str, Any] = {f"p{n}": {"$ref": f"#/$defs/d{n}"} for n in range(40)}
    properties["id"] = {"const": LONG}
    schema = {"type": "object", "properties": properties, "additionalProperties": False, "$defs": definitions}
    lark = with_literals(schema)
    assert lark is not None
    assert len(lark) < 6 * len(json.dumps(schema))


@pytest.mark.parametrize(
    "bounds", [{"minItems": 1, "maxItems": 0}, {"minItems": -1}, {"maxItems": False}, {"minItems": 1.5}]
)
def test_numbers_of_items_that_are_none_are_refused(bounds: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="minItems"):
        with_literals({"type": "array", "items": {"const": LONG}, **bounds})


def test_a_schema_within_the_lark_of_a_grammar_in_parts_is_judged_too() -> None:
    with pytest.raises(ValueError, match="too many digits"):
        as_lark(json.dumps({"grammars": [{"lark_grammar": f'start: %json {{"const": {LONG}}}'}]}))

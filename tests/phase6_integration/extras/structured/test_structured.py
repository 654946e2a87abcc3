"""Structured output: each form that a request may have, the grammar that reaches the engine, the texts that it allows.

What a grammar allows is judged by llguidance; what JSON a schema allows, by jsonschema. Cases are those of vLLM, SGLang
and llama.cpp where they have them.
"""

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import httpx2
import jsonschema
import numpy as np
import pytest

from phase6_integration.extras.structured.output_grammar import ANY_OBJECT, json_grammar
from phase6_integration.lab.random_schemas import Generator
from tests.phase6_integration.cities import CITY, TOKENIZER, allows, grammars, schema_format
from tests.phase6_integration.fake_engine import FakeEngine, client, events, says
from tests.phase6_integration.posting import BODIES, CHAT, COMPLETE, PROMPT, post

REFERENCE = Path(__file__).parents[4] / "chapters/reference.md"
CLOSED = {**CITY, "additionalProperties": False}
IPV4 = r"((25[0-5]|(2[0-4]|1\d|[1-9]|)\d)\.){3}(25[0-5]|(2[0-4]|1\d|[1-9]|)\d)"
SQL = """
root ::= select_statement
select_statement ::= "SELECT " column " from " table " where " condition
column ::= "col_1 " | "col_2 "
table ::= "table_1 " | "table_2 "
condition ::= column "= " number
number ::= "1 " | "2 "
"""


def grammar_for(fields: dict[str, Any], path: str = COMPLETE) -> str:
    """The grammar that reaches the engine."""
    engine = FakeEngine()
    answer = post(path, {**BODIES[path], **fields}, engine)
    assert answer.status_code == 200, answer.text
    grammar = engine.submitted[0].params.grammar
    assert grammar is not None
    return grammar


def outputs(**given: Any) -> dict[str, Any]:
    return {"structured_outputs": given}


PARIS = ['{"name":"Paris"}', '{"name": "Paris"}', '{\n  "name": "Paris"\n}', '{"name":"Paris"\n}']
NOT_PARIS = ['{"name":5}', "{}", '{"name":"a b"}', '{"name":"Paris"', 'Paris {"name":"Paris"}', '{"name":"Paris"} ']
FORMS: list[tuple[dict[str, Any], list[str], list[str]]] = [
    (schema_format(CITY), [*PARIS, '{"name":"Paris","in":["France"]}'], NOT_PARIS),
    (schema_format(CLOSED, strict=True, description="a city"), PARIS, [*NOT_PARIS, '{"name":"Paris","in":1}']),
    (schema_format(CLOSED, strict=False), PARIS, [*NOT_PARIS, '{"name":"Paris","in":1}']),
    ({"response_format": {"type": "json_object"}}, ["{}", '{"a": [1, {"b": null}]}'], ["[]", "5", '"a"', "{a:1}"]),
    ({"response_format": {"type": "json_object", "schema": {"const": "42"}}}, ['"42"'], ["42", '"4"']),
    (outputs(json=CITY), PARIS, NOT_PARIS),
    (outputs(json=json.dumps(CITY)), PARIS, NOT_PARIS),
    ({"guided_json": CITY}, PARIS, NOT_PARIS),
    ({"guided_json": json.dumps(CITY), "guided_decoding_backend": "xgrammar"}, PARIS, NOT_PARIS),
    (outputs(json_object=True), ["{}"], ["[]"]),
    (outputs(regex=IPV4), ["192.168.0.1", "8.8.8.8"], ["256.1.1.1", "1.2.3", "1.2.3.4.5"]),
    ({"guided_regex": r"^\w+@\w+\.com\n$"}, ["alan@turing.com\n"], ["alan@turing.com", "alan.turing.com\n"]),
    (outputs(choice=["Python", "Java", "JavaScript"]), ["Java", "JavaScript", "Python"], ["Jav", "C", "JavaJava", ""]),
    ({"guided_choice": ['"q"', "a\nb", "\x01\x7f", "naïve 😀", "back\\slash"]}, ['"q"', "a\nb", "naïve 😀"], ["q"]),
    (outputs(grammar=SQL), ["SELECT col_1  from table_2  where col_2 = 1 "], ["SELECT col_3  from table_1 "]),
    (outputs(grammar='start: "a" b?\nb: /[0-9]+/'), ["a", "a17"], ["17", "ab"]),
    (
        outputs(json=CITY, disable_any_whitespace=True),
        ['{"name":"Paris"}'],
        ['{"name": "Paris"}', '{\n"name":"Paris"}'],
    ),
    (outputs(json=CITY, whitespace_pattern=r"\t"), ['{"name":\t"Paris"}'], ['{"name": "Paris"}']),
    (
        outputs(json=CITY, whitespace_pattern=r"\s?"),
        ['{"name":\t"Paris"}'],
        ['{"name":\t\t"Paris"}', '{"name":\x0b"Paris"}'],
    ),
    (outputs(json={"type": "object", **CITY}, disable_additional_properties=True), PARIS, ['{"name":"Paris","in":1}']),
    (schema_format({"type": "integer", "not": {"const": 5}}, strict=False), ["5", "6"], ['"5"', "9" * 20]),
    (outputs(json={"type": "string", "pattern": r"\bcat\b"}), ['"a cat."', '"cat"'], ['"cats"', '"a tomcat"']),
    (
        outputs(
            json={"propertyNames": {"enum": ["a.b"]}, "additionalProperties": {"type": "integer"}, "type": "object"}
        ),
        ["{}", '{"a.b":1}'],
        ['{"a.b":"1"}', '{"axb":1}', '{"c":1}'],
    ),
    (
        outputs(json={"type": "string", "format": "date"}),
        ['"2024-02-29"', '"0001-01-01"', '"2023-12-31"'],
        ['"0000-01-01"', '"2023-02-29"', '"1900-02-29"', '"2023-04-31"'],
    ),
    (outputs(choice=[f"the {n}" for n in range(2000)]), ["the 7", "the 1999"], ["the 2000", "the"]),
    ({"guided_json": CITY, "guided_whitespace_pattern": "[ ]{0,2}"}, ['{"name":  "Paris"}'], ['{"name":   "Paris"}']),
]


@pytest.mark.parametrize(("fields", "right", "wrong"), FORMS, ids=[str(i) for i in range(len(FORMS))])
def test_a_form_reaches_the_engine_as_a_grammar_of_just_its_texts(
    fields: dict[str, Any], right: list[str], wrong: list[str]
) -> None:
    grammar = grammar_for(fields)
    assert [text for text in right if not allows(grammar, text)] == []
    assert [text for text in wrong if allows(grammar, text)] == []


@pytest.mark.parametrize("fields", [{}, {"response_format": {"type": "text"}}, {"guided_decoding_backend": "auto"}])
@pytest.mark.parametrize("path", BODIES)
def test_without_a_constraint_there_is_no_grammar(path: str, fields: dict[str, Any]) -> None:
    engine = FakeEngine()
    assert post(path, {**BODIES[path], **fields}, engine).status_code == 200
    assert engine.submitted[0].params.grammar is None


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"response_format": {"type": "sound"}}, "response_format.type", "'text', 'json_object' or 'json_schema'"),
    ({"response_format": {"type": "json_object", "schema": {"type": "hiccup"}}}, "response_format.schema", "hiccup"),
    *[
        (outputs(json=schema), "structured_outputs.json", words)
        for schema, words in [
            ({"type": "string", "not": {"const": "a"}}, '"not"'),
            ({"type": "array", "uniqueItems": True, "contains": {"const": 1}}, '"contains"'),
            ({"if": {"const": 1}, "then": {"const": 1}}, '"if"'),
            ({"oneOf": [{"type": "number"}, {"type": "integer"}]}, "oneOf"),
            ({"type": "string", "format": "zip code"}, "zip code"),
            ({"type": "string", "pattern": "(?=a)b"}, "look-around"),
            ({"$ref": "https://example.com/schema.json"}, "not present"),
            ({"$ref": "file:///etc/passwd"}, "not present"),
            ({"enum": []}, "Unsatisfiable"),
            ({"$ref": "#"}, "cannot be met"),
            ({"anyOf": [{}] * 40_000}, "others in it"),
            (
                {"$defs": {"a": {"enum": ["a" * 90_000]}}, "anyOf": [{"propertyNames": {"$ref": "#/$defs/a"}}] * 9},
                "propertyNames",
            ),
            ({"x-guidance": {"lenient": True}, "not": {}}, "x-guidance"),
            ('{"type": ', "EOF"),
            ("[]", "object"),
        ]
    ],
    (outputs(regex="(a"), "structured_outputs.regex", "unclosed group"),
    ({"guided_regex": r"\bfoo"}, "guided_regex", "lookarounds"),
    (
        outputs(grammar="not a grammar"),
        "structured_outputs.grammar",
        "Lark, as llguidance reads it, and llama.cpp's GBNF",
    ),
    (outputs(grammar="start: nothing"), "structured_outputs.grammar", "nothing"),
    (outputs(grammar="start: <[99999999]>"), "structured_outputs.grammar", "too large"),
    (
        outputs(grammar='start: %json {"x-guidance": {"lenient": true}, "not": {}}'),
        "structured_outputs.grammar",
        '"not"',
    ),
    (outputs(structural_tag="{}"), "structured_outputs.structural_tag", "not supported"),
    (outputs(json=CITY, regex="a"), "structured_outputs.regex", "structured_outputs.json and structured_outputs.regex"),
    (
        {"guided_choice": ["a"], **schema_format(CITY)},
        "guided_choice",
        "json_schema.schema and guided_choice",
    ),
    ({"guided_whitespace_pattern": " ", "guided_regex": "a"}, "guided_whitespace_pattern", "JSON"),
    ({"guided_regex": "a", "min_tokens": 1}, "min_tokens", "ends when complete"),
    (outputs(), "structured_outputs", "one of json, regex, choice, grammar, json_object"),
]


@pytest.mark.parametrize(("fields", "param", "words"), REFUSED, ids=[str(i) for i in range(len(REFUSED))])
def test_what_cannot_be_enforced_is_refused_by_name(fields: dict[str, Any], param: str, words: str) -> None:
    engine = FakeEngine()
    answer = post(COMPLETE, {**PROMPT, **fields}, engine)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == param
    assert words in error["message"]


def test_a_model_without_a_tokenizer_has_no_structured_output() -> None:
    engine = FakeEngine()
    engine.tokenizer = None

    async def ask() -> httpx2.Response:
        async with client(engine) as http:
            answer = await http.post(COMPLETE, json={"prompt": [5], "guided_regex": "a"})
            assert isinstance(answer, httpx2.Response)
            return answer

    error = asyncio.run(ask()).json()["error"]
    assert (error["param"], error["code"]) == ("guided_regex", "no_tokenizer")


def test_streams_stops_logprobs_and_echo_go_together_with_a_grammar() -> None:
    engine = FakeEngine(says('{"name":"Paris"}'))
    more = {"stop": ["}"], "logprobs": 1, "echo": True, "stream": True, "n": 2, "max_tokens": 40}
    answer = post(COMPLETE, {**PROMPT, **schema_format(CITY), **more}, engine)
    chunks = [json.loads(data) for data in events(answer.content) if data != "[DONE]"]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    for index in (0, 1):
        mine = [choice for choice in choices if choice["index"] == index]
        assert "".join(choice["text"] for choice in mine) == 'Hello{"name":"Paris"'
        assert [choice["finish_reason"] for choice in mine if choice["finish_reason"]] == ["stop"]
    assert {one.params.grammar for one in engine.submitted} == {json_grammar(CITY)}


# What a grammar allows, followed token by token at random.


def walk(grammar: str, seed: int, blank: bool = False, most: int = 200) -> tuple[str, bool]:
    """A text by random tokens of the mask, and whether it is finished. `blank`: of white space wherever allowed."""
    matcher, random = grammars(TOKENIZER).compile(grammar), np.random.default_rng(seed)
    said: list[int] = []
    while not matcher.is_stopped() and len(said) < most:
        bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        allowed = np.flatnonzero(np.unpackbits(bits, bitorder="little"))
        assert allowed.size, matcher.get_error()
        if set(allowed) & TOKENIZER.eos_ids:
            return TOKENIZER.decode(said), True
        blanks = [token for token in allowed if blank and TOKENIZER.token_bytes(int(token)).isspace()]
        said.append(int(random.choice(blanks or allowed)))
        assert matcher.consume_token(said[-1]), matcher.get_error()
    assert not matcher.is_error(), matcher.get_error()
    return TOKENIZER.decode(said), matcher.is_stopped()


def test_a_finished_text_meets_its_random_schema() -> None:
    generator, finished = Generator(seed=0), 0
    for seed in range(60):
        schema = generator.schema()
        text, done = walk(json_grammar(schema), seed)
        finished += done
        if done:
            jsonschema.validate(json.loads(text), schema)
    assert finished > 30


NESTED = {
    "type": "object",
    "properties": {"a": {"type": "array", "minItems": 2, "maxItems": 2, "items": {"const": 1}}, "b": {"const": {}}},
    "required": ["a", "b"],
    "additionalProperties": False,
}


def test_white_space_is_bounded_however_a_model_loves_it() -> None:
    text, done = walk(json_grammar(NESTED), seed=0, blank=True)
    assert done
    assert json.loads(text) == {"a": [1, 1], "b": {}}
    runs = re.findall(r"\s+", text)
    assert 10 <= len(runs) <= 20
    assert max(map(len, runs)) <= 25
    assert "  " not in walk(json_grammar(NESTED, r"\x20"), seed=0, blank=True)[0]
    assert not re.search(r"\s", walk(json_grammar(NESTED, None), seed=0, blank=True)[0])
    outside = re.sub(r'"(\\.|[^"\\])*("|$)', "", walk(json_grammar(ANY_OBJECT), seed=0, blank=True)[0])
    assert max(map(len, re.findall(r"[ \t\r\n]+", outside)), default=0) <= 25


# The examples of the reference


def example(word: str) -> dict[str, Any]:
    """What an example of the reference defines, up to its call of the server."""
    blocks = re.findall(r"```python\n(.*?)```", REFERENCE.read_text("utf-8"), re.DOTALL)
    [block] = [block for block in blocks if word in block]
    defined: dict[str, Any] = {}
    exec(re.split(r"^\w+ = client", block, flags=re.MULTILINE)[0], defined)
    return defined


def test_the_examples_of_the_readme_end_even_if_a_model_writes_blanks_wherever_it_can() -> None:
    function = {"name": "weather", "parameters": example("tool_choice")["parameters"]}
    tools = {"tools": [{"type": "function", "function": function}], "tool_choice": "required"}
    called = grammar_for({**tools, "parallel_tool_calls": False}, CHAT)
    tight = {"structured_outputs": {"disable_any_whitespace": True}, "tool_choice": "required"}
    parts = json.loads(grammar_for({**tools, **tight}, CHAT))["grammars"]
    assert parts[1]["json_schema"]["x-guidance"]["whitespace_flexible"] is False
    refused = post(CHAT, {**BODIES[CHAT], **tools, **tight, "tool_choice": "auto"})
    assert refused.json()["error"]["param"] == "structured_outputs.disable_any_whitespace"
    city = example("class City")["City"]
    parsed = grammar_for(schema_format({**city.model_json_schema(), "additionalProperties": False}), CHAT)
    for grammar in (called, parsed):
        assert walk(grammar, seed=0, blank=True, most=200)[1]
    city.model_validate_json(walk(parsed, seed=0, blank=True)[0])

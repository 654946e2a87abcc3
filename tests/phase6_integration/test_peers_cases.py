"""Structured output and tools as the tests of other servers ask for them, on the bundled model.

The cases are those of llama.cpp's server (formats, grammars, bad messages) and SGLang's (EBNF, function calling); the
expectations are theirs, where this server has the field.
"""

import json
import re
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai import OpenAI

from phase6_integration.api.settings import ServerSettings
from phase6_integration.engine.options import EngineOptions
from phase6_integration.process.async_engine import AsyncEngine
from tests.phase6_integration.application import ENGINE
from tests.phase6_integration.fake_engine import served

KEY = "sk-of-the-test"
ASKED: Any = [{"role": "system", "content": "You are a coding assistant."}, {"role": "user", "content": "An example"}]


@pytest.fixture(scope="module")
def client() -> Iterator[OpenAI]:
    options = EngineOptions(kv_cache_pages=256, max_num_seqs=16, threads=1)
    settings = ServerSettings(api_keys=(KEY,), template_timeout=60)
    with (
        served(lambda: AsyncEngine(options, factory=ENGINE), settings) as url,
        OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0) as client,
    ):
        yield client


def chat(client: OpenAI, **given: Any) -> Any:
    create: Any = client.chat.completions.create
    return create(**{"model": "tiny_chat", "messages": ASKED, "seed": 7, **given})


# llama.cpp


@pytest.mark.parametrize(
    ("format", "tokens", "pattern"),
    [
        ({"type": "json_object", "schema": {"const": "42"}}, 6, '"42"'),
        ({"type": "json_object", "schema": {"type": "array", "prefixItems": [{"type": "integer"}]}}, 10, r"\["),
        ({"type": "json_schema", "json_schema": {"schema": {"const": "foooooo"}}}, 10, '"foooooo"'),
        ({"type": "json_object"}, 10, r"\{"),
    ],
)
def test_a_format_begins_the_content(client: OpenAI, format: Any, tokens: int, pattern: str) -> None:
    content = chat(client, response_format=format, max_tokens=tokens).choices[0].message.content
    assert re.match(pattern, content)


@pytest.mark.parametrize(
    "format",
    [
        {"type": "sound"},
        {"type": "json_object", "schema": 123},
        {"type": "json_object", "schema": {"type": 123}},
        {"type": "json_object", "schema": {"type": "hiccup"}},
    ],
)
def test_a_format_that_is_none_is_refused(client: OpenAI, format: Any) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        chat(client, response_format=format, max_tokens=4)
    assert str(refused.value.param).startswith("response_format")


@pytest.mark.parametrize(
    ("grammar", "pattern"),
    [
        ('root ::= "a"{5,5}', "a{5}"),
        ('root ::= "Hello" | "Hi" | "Hey"', "Hello|Hi|Hey"),  # this and the next are SGLang's
        (
            'root ::= "{" pair "}"\npair ::= "\\"name\\"" ":" string\nstring ::= "\\"" [A-Za-z]{1,12} "\\""',
            r'\{"name":"[A-Za-z]+"\}',
        ),
    ],
)
def test_a_grammar_is_met(client: OpenAI, grammar: str, pattern: str) -> None:
    (choice,) = chat(client, extra_body={"structured_outputs": {"grammar": grammar}}, max_tokens=200).choices
    assert choice.finish_reason == "stop"
    assert re.fullmatch(pattern, choice.message.content)


@pytest.mark.parametrize(
    "messages",
    [None, "string", [123], [{}], [{"role": 123}], [{"role": "system", "content": 123}], [*ASKED, {}]],
)
def test_messages_that_are_none_are_refused(client: OpenAI, messages: Any) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        chat(client, messages=messages)
    assert str(refused.value.param).startswith("messages")


# SGLang


def function(name: str, kind: str = "integer", **more: Any) -> Any:
    numbers = {letter: {"type": kind, "description": "A number"} for letter in "ab"}
    parameters = {"type": "object", "properties": numbers, "required": ["a", "b"]}
    return {"type": "function", "function": {"name": name, "parameters": parameters, **more}}


def test_the_parameters_of_a_tool_that_need_not_be_called_are_only_shown(client: OpenAI) -> None:
    """`int` is no type of JSON Schema. A model reads it; a grammar cannot."""
    answer = chat(client, tools=[function("add", "int")], max_tokens=8)
    assert answer.choices[0].finish_reason in ("stop", "length", "tool_calls")
    with pytest.raises(openai.BadRequestError) as refused:
        chat(client, tools=[function("add", "int")], tool_choice="required")
    assert refused.value.param == "tools"


@pytest.mark.parametrize("strict", [True, False])
def test_streamed_arguments_join_to_json(client: OpenAI, strict: bool) -> None:
    tools = [function("add", strict=strict)]
    given = {"tools": tools, "tool_choice": "required", "parallel_tool_calls": False}
    chunks = [chunk.choices[0] for chunk in chat(client, stream=True, **given)]
    calls = [call for chunk in chunks for call in chunk.delta.tool_calls or ()]
    assert [call.function.name for call in calls if call.function.name] == ["add"]
    assert {*json.loads("".join(call.function.arguments or "" for call in calls))} == {"a", "b"}
    assert chunks[-1].finish_reason == "tool_calls"
    assert not any(chunk.delta.content for chunk in chunks)


@pytest.mark.parametrize("stream", [False, True])
def test_the_chosen_function_is_called(client: OpenAI, stream: bool) -> None:
    tools, chosen = [function("sub"), function("add")], {"type": "function", "function": {"name": "add"}}
    answer = chat(client, tools=tools, tool_choice=chosen, stream=stream)
    if stream:
        calls = [call for chunk in answer for call in chunk.choices[0].delta.tool_calls or ()]
        assert [call.function.name for call in calls if call.function.name] == ["add"]
    else:
        (call,) = answer.choices[0].message.tool_calls
        assert call.function.name == "add"
        assert all(isinstance(value, int) for value in json.loads(call.function.arguments).values())


def test_a_result_is_the_input_of_the_next_turn(client: OpenAI) -> None:
    given: Any = {"tools": [function("add")], "max_tokens": 40}
    first = chat(client, **given, tool_choice="required", parallel_tool_calls=False).choices[0].message
    (call,) = first.tool_calls
    result = {"role": "tool", "tool_call_id": call.id, "content": "8", "name": "add"}
    assert chat(client, messages=[*ASKED, first, result], **given).choices[0].message.role == "assistant"


def test_a_chosen_function_must_be_a_tool(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="mul"):
        chat(client, tools=[function("add")], tool_choice={"type": "function", "function": {"name": "mul"}})

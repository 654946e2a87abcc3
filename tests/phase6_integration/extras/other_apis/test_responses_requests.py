"""/v1/responses: the bodies of clients, what is refused, and the chat request that a body becomes."""

import json

import pytest

from phase6_integration.api.settings import ServerSettings
from phase6_integration.app import create_app
from phase6_integration.extras.other_apis.responses_request import ResponsesRequest, chat_fields
from tests.phase6_integration.asgi import Call, awaited
from tests.phase6_integration.fake_engine import FakeEngine
from tests.phase6_integration.responses import PATH, TOOL, Json, ask, error_of, events_of

pytestmark = pytest.mark.usefixtures("one_tokenizer")


# What clients send.

MESSAGE = {"type": "message", "role": "user", "content": "Hello"}
TEXT = {"type": "output_text", "text": "Hi"}
CLIENTS: dict[str, Json] = {
    "agents sdk": {
        "input": [
            {"content": "Hello", "role": "user"},
            {"id": "msg_1", "content": [{**TEXT, "annotations": [], "logprobs": []}], "role": "assistant"}
            | {"status": "completed", "type": "message"},
            {"content": "Go on", "role": "user"},
        ],
        "instructions": "Be brief.",
        "model": "tiny_chat",
        "include": [],
        "tools": [],
        "parallel_tool_calls": False,
        "truncation": "disabled",
        "metadata": {"trace": "1"},
        "text": {"verbosity": "low"},
        "stream": True,
    },
    "ai sdk": {
        "input": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": [{"type": "input_text", "text": "Hello"}]},
            {"role": "assistant", "content": [TEXT]},
            {"role": "user", "content": [{"type": "input_text", "text": "Go on"}]},
        ],
        "temperature": 0.2,
        "max_output_tokens": 30,
        "store": True,
        "include": ["reasoning.encrypted_content", "message.output_text.logprobs"],
        "top_logprobs": 3,
        "service_tier": "auto",
        "prompt_cache_key": "k",
        "safety_identifier": "s",
        "text": {"format": {"type": "text"}, "verbosity": "medium"},
        "stream": True,
    },
    "langchain": {
        "input": [MESSAGE, {**MESSAGE, "role": "assistant", "phase": "final_answer"}, MESSAGE],
        "stream": False,
        "stream_options": {"include_obfuscation": False},
        "reasoning": {"effort": None, "summary": "auto"},
    },
    "vllm's history": {
        "input": [
            MESSAGE,
            {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": None, "status": "completed"},
            {"type": "message", "role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
            {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "Hm."}], "summary": []},
            MESSAGE,
        ],
        "reasoning": {"effort": "none"},
        "background": False,
        "previous_response_id": None,
        "repetition_penalty": 1.2,
    },
}


@pytest.mark.parametrize("name", CLIENTS)
def test_the_bodies_of_clients_are_accepted(name: str) -> None:
    body = CLIENTS[name]
    call = ask(body)
    assert call.status == 200, call.content
    if body.get("stream"):
        assert events_of(call)[-1]["type"] in ("response.completed", "response.incomplete")


REFUSED: list[tuple[Json, str, str]] = [
    ({"previous_response_id": "resp_1"}, "previous_response_id", "unsupported_field"),
    ({"background": True}, "background", "unsupported_field"),
    ({"conversation": "conv_1"}, "conversation", "unsupported_field"),
    ({"prompt": {"id": "pmpt_1"}}, "prompt", "unsupported_field"),
    ({"truncation": "none"}, "truncation", "invalid_value"),
    ({"n": 2}, "n", "unsupported_field"),
    ({"max_tokens": 5}, "max_tokens", "unsupported_field"),
    ({"response_format": {"type": "json_object"}}, "response_format", "unsupported_field"),
    ({"tools": [{"type": "web_search", "filters": {}}]}, "tools.0.type", "invalid_value"),
    ({"tool_choice": {"type": "file_search"}}, "tool_choice.type", "invalid_value"),
    ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input.0", "invalid_value"),
    ({"input": [{"type": "computer_call", "id": "x"}]}, "input.0", "invalid_value"),
    (
        {"input": [{"role": "user", "content": [{"type": "input_text", "refusal": "No."}]}]},
        "input.0.content.0.text",
        "missing_field",
    ),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input.0.content.0.type", "invalid_value"),
    ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema", "conflicting_values"),
    ({"text": {"format": {"type": "json_object", "schema": {}}}}, "text.format.schema", "conflicting_values"),
    ({"input": []}, "input", "invalid_value"),
    ({"input": 5}, "input", "invalid_value"),
    ({"input": [{"role": "tool", "content": "x"}]}, "input.0.role", "invalid_value"),
    ({"instruction": "x"}, "instruction", "unknown_field"),
    ({"max_output_tokens": 0}, "max_output_tokens", "invalid_value"),
    ({"max_output_tokens": 2040}, "input", "context_length_exceeded"),
    ({"input": "a " * 3000}, "input", "context_length_exceeded"),
    ({"input": ["a"]}, "input.0", "invalid_value"),
    ({"input": [{"type": "reasoning", "summary": []}]}, "input", "empty_prompt"),
    ({"metadata": {"a": 1}}, "metadata.a", "invalid_value"),
    ({"input": [{"role": "user", "content": "a"}] * 4097}, "input", "invalid_value"),
]


@pytest.mark.parametrize(("body", "param", "code"), REFUSED, ids=[str(body)[:48] for body, _, _ in REFUSED])
def test_what_is_refused_is_named(body: Json, param: str, code: str) -> None:
    call = ask({"input": "Hello", **body})
    assert call.status == 400, call.content
    assert (call.json["error"]["param"], call.json["error"]["code"]) == (param, code)


def test_an_error_of_the_conversation_names_the_input() -> None:
    error = error_of({"input": [{"role": "assistant", "content": ""}], "instructions": "a " * 40_000})
    assert error["param"] == "input"
    assert "messages" not in error["message"]
    format = {"type": "json_schema", "name": "x", "schema": {"x-guidance": {}}}
    assert error_of({"input": "Hello", "text": {"format": format}})["message"].startswith("text.format: x-guidance")


def test_the_type_that_is_refused_and_those_that_are_allowed_are_named() -> None:
    message = error_of({"input": "Hello", "tools": [TOOL, {"type": "mcp", "server_label": "x"}]})["message"]
    assert "tools.1" in message
    assert "mcp" in message
    assert "function" in message


# The chat request that it becomes.


def chat(body: Json) -> Json:
    fields = chat_fields(ResponsesRequest.model_validate_json(json.dumps({"input": "Hello", **body})))
    return {name: value for name, value in fields.items() if value is not None}


def test_the_items_of_a_turn_are_one_message_of_the_assistant() -> None:
    call = {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "weather", "arguments": "{}"}
    items = [
        {"role": "user", "content": "Hello"},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Let me see."}]},
        call,
        {**call, "call_id": "c2", "status": "completed"},
        {"type": "function_call_output", "call_id": "c1", "output": "sun"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "rain"}]},
        {**call, "call_id": "c3"},
    ]
    function = {"name": "weather", "arguments": "{}"}
    calls = [{"id": f"c{i}", "type": "function", "function": function} for i in (1, 2, 3)]
    assert chat({"input": items, "instructions": "Be brief."})["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hello"},
        {
            "role": "assistant",
            "content": [{"type": "text", "text": "Let me see."}],
            "reasoning_content": "Hm.",
            "tool_calls": calls[:2],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "sun"},
        {"role": "tool", "tool_call_id": "c2", "content": [{"type": "text", "text": "rain"}]},
        {"role": "assistant", "content": None, "tool_calls": calls[2:]},
    ]


def test_tools_and_the_choice_of_one_are_those_of_chat() -> None:
    found = chat({"tools": [{**TOOL, "strict": True}], "tool_choice": {"type": "function", "name": "weather"}})
    function = {"name": "weather", "description": "of a city", "parameters": {"type": "object"}, "strict": True}
    assert found["tools"] == [{"type": "function", "function": function}]
    assert found["tool_choice"] == {"type": "function", "function": {"name": "weather"}}
    some = {"mode": "required", "tools": [{"type": "function", "name": "weather"}]}
    found = chat({"tools": [TOOL], "tool_choice": {"type": "allowed_tools", **some}})["tool_choice"]
    assert found["allowed_tools"]["mode"] == "required"
    assert [tool["function"]["name"] for tool in found["allowed_tools"]["tools"]] == ["weather"]
    assert [chat({"tool_choice": choice}).get("tool_choice") for choice in ("auto", "required")] == [None, "required"]
    assert "tools" not in chat({"tools": []})


def test_the_format_of_the_text_is_the_response_format() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    own = {"type": "json_schema", "name": "x", "schema": schema, "strict": True}
    format = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}
    assert chat({"text": {"format": own}})["response_format"] == format
    assert chat({"text": {"format": {"type": "json_object"}}})["response_format"] == {"type": "json_object"}
    assert "response_format" not in chat({"text": {"verbosity": "low"}})


@awaited
async def test_truncation_keeps_as_much_of_a_long_input_as_fits() -> None:
    app = create_app(FakeEngine(max_model_len=64), ServerSettings())
    body = {"input": "one two three " * 500, "max_output_tokens": 8}
    async with Call(app, PATH, {**body, "truncation": "auto"}) as cut, Call(app, PATH, body) as whole:
        pass
    assert (cut.json["truncation"], cut.json["usage"]["input_tokens"]) == ("auto", 56)
    assert whole.json["error"]["code"] == "context_length_exceeded"

"""/v1/messages: Anthropic's Messages API, in the official client's types."""

import asyncio
import json
from typing import Any, get_args

import pytest
from anthropic.types import Message, MessageTokensCount, RawMessageStreamEvent

from phase0_request.request import FinishReason, Request
from phase6_integration import connect
from phase6_integration.api.formatter import encode
from phase6_integration.api.settings import ServerSettings
from phase6_integration.app import create_app
from phase6_integration.extras.other_apis.translation import object_of
from tests.phase6_integration import posting
from tests.phase6_integration.asgi import Call, awaited
from tests.phase6_integration.fake_engine import FakeEngine, Script, echo, says

pytestmark = pytest.mark.usefixtures("one_tokenizer")

Json = dict[str, Any]
PATH = "/v1/messages"
HELLO: list[Json] = [{"role": "user", "content": "Hello"}]
EVENTS = {event.model_fields["type"].annotation: event for event in get_args(get_args(RawMessageStreamEvent)[0])}
EVENTS = {kind: event for annotation, event in EVENTS.items() for kind in get_args(annotation)}
TOOL = {"name": "weather", "description": "of a city", "input_schema": {"type": "object", "properties": {"city": {}}}}
CALLS = says(
    "<think>Hm.</think>Let me see.\n"
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "weather", "arguments": {}}\n</tool_call>'
)


def ask(body: Json, script: Script | FakeEngine = echo, path: str = PATH, **settings: Any) -> Call:
    """One request, to its end."""
    engine = script if isinstance(script, FakeEngine) else FakeEngine(script)

    async def send() -> Call:
        given = {"max_tokens": 200, **body} if path == PATH else body
        async with Call(create_app(engine, connect.settings(**settings)), path, given) as call:
            pass
        return call

    return asyncio.run(asyncio.wait_for(send(), 60))


def answer(body: Json, script: Script | FakeEngine = echo, **settings: Any) -> Json:
    """A whole answer, in the official client's shape."""
    call = ask({"messages": HELLO, **body}, script, **settings)
    assert call.status == 200, call.content
    Message.model_validate(call.json, strict=True)
    return dict(call.json)


def stream(body: Json, script: Script | FakeEngine = echo, **settings: Any) -> list[Json]:
    """The events of a stream, each named, and in the official client's shape."""
    call = ask({"messages": HELLO, "stream": True, **body}, script, **settings)
    assert call.status == 200, call.content
    events = []
    for block in call.content.decode().strip().split("\n\n"):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        if event["type"] != "error":
            EVENTS[event["type"]].model_validate(event, strict=True)
        events.append(event)
    return events


def joined(events: list[Json]) -> Json:
    """The message that a client makes of a stream."""
    message, texts = dict(events[0]["message"]), dict[int, str]()
    message["content"] = []
    for event in events[1:]:
        if event["type"] == "content_block_start":
            assert event["index"] == len(message["content"]), "blocks follow each other"
            message["content"].append(event["content_block"])
            texts[event["index"]] = ""
        elif event["type"] == "content_block_delta":
            assert event["index"] == len(message["content"]) - 1
            texts[event["index"]] += next(value for name, value in event["delta"].items() if name != "type")
        elif event["type"] == "message_delta":
            message |= event["delta"]
            message["usage"] |= event["usage"]
    for index, block in enumerate(message["content"]):
        if block["type"] == "tool_use":
            block["input"] = json.loads(texts[index] or "{}")
        else:
            block[block["type"]] = texts[index]
    return message


def test_an_answer_is_a_message_of_text() -> None:
    found = answer({}, says("one two three"))
    assert found["content"] == [{"type": "text", "text": "one two three"}]
    assert (found["role"], found["stop_reason"], found["stop_sequence"]) == ("assistant", "end_turn", None)
    assert found["id"].startswith("msg_")


def test_calls_and_thinking_are_blocks_of_their_own() -> None:
    found = answer({"tools": [TOOL]}, CALLS, reasoning_parser="deepseek_r1")
    thinking, text, first, second = found["content"]
    assert (thinking["type"], thinking["thinking"]) == ("thinking", "Hm.")
    assert text["text"].startswith("Let me see.")
    assert (first["type"], first["name"], first["input"], second["input"]) == (
        "tool_use",
        "weather",
        {"city": "Rome"},
        {},
    )
    assert first["id"] != second["id"]
    assert found["stop_reason"] == "tool_use"


@pytest.mark.parametrize("script", [says("one two three"), CALLS, says("")])
def test_a_stream_adds_up_to_the_whole_answer(script: Script) -> None:
    body, settings = {"tools": [TOOL]}, {"reasoning_parser": "deepseek_r1"}
    whole, events = answer(body, script, **settings), stream(body, script, **settings)
    streamed = joined(events)
    for message in (whole, streamed):
        message["id"] = ""
        for block in message["content"]:
            block.pop("id", None)
    assert streamed == whole
    assert [event["type"] for event in (events[0], *events[-2:])] == ["message_start", "message_delta", "message_stop"]


def test_an_answer_says_why_it_ended() -> None:
    cut = answer({"max_tokens": 2}, says("one two three"))
    assert (cut["stop_reason"], cut["usage"]["output_tokens"]) == ("max_tokens", 2)
    stopped = answer({"stop_sequences": ["thr"]}, says("one two three"))
    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", "thr")
    assert stopped["content"][0]["text"] == "one two "


def test_a_call_that_is_cut_off_has_no_input() -> None:
    found = answer(
        {"tools": [TOOL], "max_tokens": 30}, says('<tool_call>\n{"name": "weather", "arguments": {"city": "' + "R" * 99)
    )
    assert found["stop_reason"] == "max_tokens"
    assert [block.get("input", {}) for block in found["content"]] == [{}]


def test_input_tokens_are_those_that_were_not_cached() -> None:
    engine = FakeEngine(says("one"))
    engine.cached = 4
    usage = answer({}, engine)["usage"]
    assert usage["cache_read_input_tokens"] == 4
    assert usage["input_tokens"] == len(engine.submitted[0].prompt_tokens) - 4


@awaited
async def test_the_prompt_is_that_of_the_chat_that_says_the_same() -> None:
    engine = FakeEngine(says("one"))
    app = create_app(engine, ServerSettings())
    thinking = {"type": "thinking", "thinking": "Hm.", "signature": "s"}
    result = {"type": "tool_result", "tool_use_id": "c1", "content": "sun", "is_error": False}
    use = {"type": "tool_use", "id": "c1", "name": "weather", "input": {"city": "Rome"}}
    body = {
        "system": [{"type": "text", "text": text, "cache_control": {"type": "ephemeral"}} for text in ("Be", "brief.")],
        "tools": [TOOL],
        "max_tokens": 5,
        "temperature": 0.5,
        "top_k": 7,
        "stop_sequences": ["x"],
        "metadata": {"user_id": "u"},
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "Weather?"}]},
            {"role": "assistant", "content": [thinking, {"type": "text", "text": "I see."}, use]},
            {"role": "user", "content": [result, {"type": "text", "text": "And?"}]},
        ],
    }
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    function = {"name": "weather", "description": "of a city", "parameters": TOOL["input_schema"]}
    chat = {
        "messages": [
            {"role": "system", "content": "Be\nbrief."},
            {"role": "user", "content": "Weather?"},
            {"role": "assistant", "content": "I see.", "reasoning_content": "Hm.", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c1", "content": "sun"},
            {"role": "user", "content": "And?"},
        ],
        "tools": [{"type": "function", "function": function}],
        "max_tokens": 5,
        "temperature": 0.5,
        "top_k": 7,
        "stop": ["x"],
    }
    for path, given in ((PATH, body), ("/v1/chat/completions", chat)):
        async with Call(app, path, given) as sent:
            pass
        assert sent.status == 200, sent.content
    ours, theirs = engine.submitted
    assert (ours.prompt_tokens, ours.params) == (theirs.prompt_tokens, theirs.params)
    given = {name: value for name, value in body.items() if name in ("system", "tools", "messages")}
    async with Call(app, f"{PATH}/count_tokens", given) as counted:
        pass
    assert MessageTokensCount.model_validate(counted.json, strict=True).input_tokens == len(ours.prompt_tokens)


@pytest.mark.parametrize(
    ("choice", "chats"),
    [
        ({"type": "any"}, {"tool_choice": "required"}),
        ({"type": "tool", "name": "time"}, {"tool_choice": {"type": "function", "function": {"name": "time"}}}),
        ({"type": "none"}, {"tool_choice": "none"}),
        ({"type": "any", "disable_parallel_tool_use": True}, {"tool_choice": "required", "parallel_tool_calls": False}),
    ],
)
def test_a_choice_of_tools_is_that_of_the_chat(choice: Json, chats: Json) -> None:
    engine, schema = FakeEngine(CALLS), TOOL["input_schema"]
    answer({"tools": [TOOL, {"name": "time", "input_schema": schema}], "tool_choice": choice}, engine)
    functions = [{**TOOL, "parameters": schema}, {"name": "time", "parameters": schema}]
    tools = [{"type": "function", "function": function} for function in functions]
    ask({"messages": HELLO, "max_tokens": 200, "tools": tools, **chats}, engine, "/v1/chat/completions")
    ours, theirs = engine.submitted
    assert ours.params == theirs.params


def test_the_last_message_is_continued_if_it_is_the_assistants() -> None:
    engine = FakeEngine(says("one"))
    chat = {"messages": [*HELLO, {"role": "assistant", "content": "A KV"}]}
    answer(chat, engine)
    continued = {**chat, "continue_final_message": True, "add_generation_prompt": False}
    ask(continued, engine, "/v1/chat/completions")
    ask(chat, engine, "/v1/chat/completions")
    ours, theirs, answered = engine.submitted
    assert ours.prompt_tokens == theirs.prompt_tokens != answered.prompt_tokens


@pytest.mark.parametrize(
    "schema", [{"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}, {}]
)
def test_a_format_is_enforced(schema: Json) -> None:
    engine = FakeEngine(says('{"age": 1}'))
    answer({"output_config": {"format": {"type": "json_schema", "schema": schema}}}, engine)
    format = {"type": "json_schema", "json_schema": {"name": "output", "schema": schema}}
    ask({"messages": HELLO, "response_format": format}, engine, "/v1/chat/completions")
    ours, theirs = engine.submitted
    assert ours.params.grammar == theirs.params.grammar is not None


IMAGE = {"type": "image", "source": {}}
USE = {"type": "tool_use", "id": "a", "name": "b", "input": {}}
REFUSED: list[tuple[Json, str]] = [
    ({"max_tokens": None}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": 10**6}, "max_tokens may be at most"),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "tool", "content": "a"}]}, "messages.0.role"),
    ({"messages": [{"role": "user", "content": [{"type": "tool_result", "content": "a"}]}]}, "tool_use_id"),
    ({"stop": ["x"]}, "'stop' is not supported"),
    ({"n": 2}, "'n' is not supported"),
    ({"thread": {"type": "create"}}, "'thread' is not supported"),
    ({"temprature": 1}, "did you mean 'temperature'?"),
    ({"messages": [{"role": "user", "content": [IMAGE]}]}, "a content block of this server is one of"),
    ({"messages": [{"role": "user", "content": [USE]}]}, "tool_use is the assistant's"),
    ({"messages": [{"role": "user", "content": []}]}, "no message has any content"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools.0"),
    ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "other"}}, "not one of the tools"),
    ({"output_config": {"format": {"type": "json_schema", "schema": {"type": "nothing"}}}}, "output_config.format"),
]


@pytest.mark.parametrize(("body", "words"), REFUSED)
def test_what_is_refused_is_named_in_the_shape_of_this_api(body: Json, words: str) -> None:
    call = ask({"messages": HELLO, **body})
    assert call.status == 400, call.content
    error = call.json
    assert (error["type"], error["error"]["type"]) == ("error", "invalid_request_error")
    assert words in error["error"]["message"]


@pytest.mark.parametrize(
    ("reason", "kind"), [(FinishReason.ERROR, "api_error"), (FinishReason.TIMEOUT, "timeout_error")]
)
def test_a_failure_is_an_error_of_this_api_whole_and_streamed(reason: FinishReason, kind: str) -> None:
    def fails(request: Request) -> list[int | FinishReason]:
        return [*request.prompt_tokens[:3], reason]

    assert ask({"messages": HELLO}, fails).json["error"]["type"] == kind
    last = stream({}, fails)[-1]
    assert (last["type"], last["error"]["type"]) == ("error", kind)


@awaited
async def test_the_key_may_come_as_anthropics_clients_send_it() -> None:
    app = create_app(FakeEngine(says("one")), connect.settings(api_keys=("sk-one",)))
    body = {"messages": HELLO, "max_tokens": 5}
    keys = [({"x-api-key": "sk-one"}, 200), ({"authorization": "Bearer sk-one"}, 200), ({"x-api-key": "sk-two"}, 401)]
    for headers, status in [*keys, ({"x-api-key": "sk-one", "authorization": "Bearer sk-two"}, 401), ({}, 401)]:
        async with Call(app, PATH, body, headers) as call:
            pass
        assert call.status == status
        assert status == 200 or call.json["error"]["type"] == "authentication_error"


@awaited
async def test_an_unknown_model_is_not_found() -> None:
    async with Call(
        create_app(FakeEngine(), ServerSettings()), PATH, {"model": "m", "messages": HELLO, "max_tokens": 1}
    ) as call:
        pass
    assert (call.status, call.json["error"]["type"]) == (404, "not_found_error")


def test_every_answer_and_every_error_has_the_id_of_its_request() -> None:
    """In the header that Anthropic's clients read, and in errors in the body too."""
    sent = {"x-request-id": "mine"}
    fine = posting.send(
        "POST", "/v1/messages", {"max_tokens": 2, "messages": [{"role": "user", "content": "a"}]}, headers=sent
    )
    assert (fine.status_code, fine.headers["request-id"], fine.headers["x-request-id"]) == (200, "mine", "mine")
    for path in ("/v1/messages", "/v1/messages/batches"):
        wrong = posting.send("POST", path, {}, headers=sent)
        assert (wrong.headers["request-id"], wrong.json()["request_id"], wrong.json()["type"]) == (
            "mine",
            "mine",
            "error",
        )


def test_input_that_is_nested_too_deeply_to_be_read_is_left_out() -> None:
    assert encode(object_of("[" * 5000 + "]" * 5000)) == b"{}"
    assert encode(object_of('{"a": ' * 5000 + "1" + "}" * 5000)) == b"{}"
    assert encode(object_of('{"a": [1]}')) == b'{"a":[1]}'

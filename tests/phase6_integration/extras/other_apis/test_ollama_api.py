"""Ollama's API: lines of JSON that say what the chat says. `make clients` has its official client."""

import asyncio
import json
from typing import Any

import pytest

from phase0_request.request import FinishReason, Request
from phase6_integration import connect
from phase6_integration.api.settings import ServerSettings
from phase6_integration.app import create_app
from phase6_integration.process.messages import Ready
from tests.phase6_integration.asgi import Call
from tests.phase6_integration.fake_engine import FakeEngine, Script, says
from tests.phase6_integration.posting import send

pytestmark = pytest.mark.usefixtures("one_tokenizer")

Json = dict[str, Any]
CHAT, GENERATE = "/api/chat", "/api/generate"
HELLO: Json = {"model": "tiny_chat", "messages": [{"role": "user", "content": "Hello"}]}
HELLO_TEXT: Json = {"model": "tiny_chat", "prompt": "Hello"}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}
CALLS = says(
    "<think>Hm.</think>Let me see.\n"
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "weather", "arguments": {}}\n</tool_call>'
)


def ask(path: str, body: Json, engine: FakeEngine, **settings: Any) -> Call:
    async def send() -> Call:
        async with Call(create_app(engine, connect.settings(**settings)), path, body) as call:
            pass
        return call

    return asyncio.run(asyncio.wait_for(send(), 60))


def answer(path: str, body: Json, script: Script | FakeEngine, **settings: Any) -> Json:
    """A whole answer, and that its lines in a stream add up to it."""
    found = []
    for stream in (False, None):
        engine = script if isinstance(script, FakeEngine) else FakeEngine(script)
        call = ask(path, {**body, **({} if stream is None else {"stream": stream})}, engine, **settings)
        assert call.status == 200, call.content
        assert call.headers["content-type"] == ("application/json" if stream is False else "application/x-ndjson")
        *lines, last = [json.loads(line) for line in call.content.splitlines()]
        assert last["done"]
        assert not any(line["done"] for line in lines)
        texts = [line.get("response") or line.get("message", {}).get("content") or "" for line in (*lines, last)]
        thoughts = [line.get("thinking") or line.get("message", {}).get("thinking") or "" for line in (*lines, last)]
        said = {"text": "".join(texts), "thinking": "".join(thoughts), "why": last["done_reason"]}
        found.append(said | {"calls": last.get("message", {}).get("tool_calls"), "tokens": last["eval_count"]})
        assert all(line["model"] == "tiny_chat" and line["created_at"] for line in (*lines, last))
        assert min(value for name, value in last.items() if name.endswith("_duration")) >= 0
    assert found[0] == found[1]
    return dict(found[0])


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, HELLO),
        (CHAT, {**HELLO, "messages": [{"role": "assistant", "content": None}, *HELLO["messages"]]}),
        (GENERATE, {"model": "tiny_chat:latest", "prompt": "Hello"}),
    ],
)
def test_an_answer_is_the_text_of_the_chat(path: str, body: Json) -> None:
    found = answer(path, body, says("one two three"))
    assert (found["text"], found["why"]) == ("one two three", "stop")
    cut = answer(path, {**body, "options": {"num_predict": 2}}, says("one two three"))
    assert (cut["why"], cut["tokens"]) == ("length", 2)


def test_calls_are_objects_and_thinking_has_a_field() -> None:
    found = answer(CHAT, {**HELLO, "tools": [TOOL]}, CALLS, reasoning_parser="deepseek_r1")
    assert [call["function"] for call in found["calls"]] == [
        {"name": "weather", "arguments": {"city": "Rome"}},
        {"name": "weather", "arguments": {}},
    ]
    assert (found["thinking"], found["text"].strip(), found["why"]) == ("Hm.", "Let me see.", "stop")
    assert answer(GENERATE, {"model": "tiny_chat", "prompt": "a"}, CALLS, reasoning_parser="deepseek_r1")["thinking"]


def test_the_request_is_that_of_the_chat_that_says_the_same() -> None:
    options = {"temperature": 0.5, "top_k": 7, "top_p": 0.9, "min_p": 0.1, "seed": 3, "stop": ["x"]}
    penalties = {"presence_penalty": 0.5, "frequency_penalty": 0.25}
    schema = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}
    call = {"name": "weather", "arguments": {"city": "Rome"}}
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": "", "thinking": "Hm.", "tool_calls": [{"function": call}]},
        {"role": "tool", "content": "sun", "tool_name": "weather"},
        {"role": "user", "content": "And?"},
    ]
    ours = {
        "model": "tiny_chat",
        "messages": messages,
        "keep_alive": "5m",
        "think": False,
        "format": schema,
        "options": {**options, **penalties, "num_predict": 5, "repeat_penalty": 1.2, "num_ctx": 4096},
    }
    theirs = {
        **options,
        **penalties,
        "messages": [
            *messages[:2],
            {
                "role": "assistant",
                "content": "",
                "reasoning_content": "Hm.",
                "tool_calls": [{"function": {**call, "arguments": json.dumps(call["arguments"])}}],
            },
            {"role": "tool", "content": "sun", "name": "weather"},
            messages[-1],
        ],
        "max_tokens": 5,
        "repetition_penalty": 1.2,
        "chat_template_kwargs": {"enable_thinking": False},
        "response_format": {"type": "json_schema", "json_schema": {"schema": schema}},
    }
    engine = FakeEngine(says('{"age": 1}'))
    for path, body in ((CHAT, ours), ("/v1/chat/completions", theirs)):
        assert ask(path, body, engine).status == 200
    first, second = engine.submitted
    assert (first.prompt_tokens, first.params) == (second.prompt_tokens, second.params)


@pytest.mark.parametrize("length", [-2, -1, 0])
def test_a_length_below_1_is_not_given(length: int) -> None:
    engine = FakeEngine(says("one"))
    for options in ({"num_predict": length}, {}):
        ask(CHAT, {**HELLO, "options": options}, engine)
    first, second = engine.submitted
    assert first.params == second.params


def test_what_changes_nothing_is_taken() -> None:
    """Clients send their defaults."""
    empty = {"suffix": "", "template": "", "raw": False, "context": [], "images": [], "system": "", "options": {}}
    body = {"model": "tiny_chat", "prompt": "Hello", **empty, "format": "", "logprobs": False, "top_logprobs": 0}
    assert answer(GENERATE, body, says("one")) == answer(GENERATE, dict.fromkeys(body) | HELLO_TEXT, says("one"))


REFUSED: list[tuple[str, Json, str]] = [
    (CHAT, {"options": {"num_predict": "x"}}, "options.num_predict"),
    (CHAT, {"options": {"temperature": -1}}, "options.temperature"),
    (CHAT, {"options": {"mirostat": 2}}, "'options.mirostat' is not a field"),
    (CHAT, {"messages": [{"role": "user", "content": "a", "images": ["AAAA"]}]}, "messages.0.images"),
    (CHAT, {"format": {"type": "nothing"}}, "format"),
    (CHAT, {"format": "xml"}, "format: Input should be 'json'"),
    (CHAT, {"format": 5}, 'format is "json" or a JSON schema'),
    (CHAT, {"messages": [{"role": "user", "content": "a" * 100_000}]}, "context"),
    (GENERATE, {"images": ["AAAA"]}, "images"),
    *((GENERATE, {name: value}, name) for name, value in {"suffix": "a", "raw": True, "template": "a"}.items()),
    *((GENERATE, {name: value}, name) for name, value in {"context": [1], "logprobs": True}.items()),
    (GENERATE, {"prompt": 5}, "prompt"),
]


@pytest.mark.parametrize(("path", "body", "words"), REFUSED)
def test_what_is_refused_is_named_in_the_shape_of_this_api(path: str, body: Json, words: str) -> None:
    given = HELLO if path == CHAT else {"model": "tiny_chat", "prompt": "Hello"}
    call = ask(path, {**given, **body}, FakeEngine())
    assert call.status == 400, call.content
    assert words in call.json["error"]


def test_an_unknown_model_is_not_found() -> None:
    call = ask(CHAT, {**HELLO, "model": "other"}, FakeEngine())
    assert (call.status, call.json["code"]) == (404, "model_not_found")


def test_a_failure_in_a_stream_is_its_last_line() -> None:
    def fails(request: Request) -> list[int | FinishReason]:
        return [*request.prompt_tokens[:3], FinishReason.ERROR]

    last = json.loads(ask(CHAT, HELLO, FakeEngine(fails)).content.splitlines()[-1])
    assert last["code"] == "internal_error"


def test_silence_is_a_line_without_text() -> None:
    engine = FakeEngine(says("one"))
    engine.flow.clear()

    async def read() -> list[Json]:
        async with Call(create_app(engine, ServerSettings(keepalive=0.01)), CHAT, HELLO) as call:
            await call.until(lambda call: call.content.count(b"\n") >= 2)
            engine.flow.set()
        return [json.loads(line) for line in call.content.splitlines()]

    first, *others = asyncio.run(asyncio.wait_for(read(), 60))
    assert (first["message"], first["done"]) == ({"role": "assistant", "content": ""}, False)
    assert "".join(line["message"]["content"] for line in others) == "one"


@pytest.mark.parametrize(("path", "field"), [(CHAT, "message"), (GENERATE, "response")])
def test_a_request_without_a_prompt_finds_the_model_loaded(path: str, field: str) -> None:
    engine = FakeEngine()
    found = ask(path, {"model": "tiny_chat"}, engine).json
    assert (found["done"], found["done_reason"], field in found) == (True, "load", True)
    assert engine.submitted == []


def test_the_model_is_listed() -> None:
    names = [model["name"] for model in send("GET", "/api/tags", settings=ServerSettings()).json()["models"]]
    assert names == ["tiny_chat"]
    assert send("GET", "/api/version").json()["version"]


def test_arguments_that_are_nested_too_deeply_to_be_read_are_left_out() -> None:
    text = f'<tool_call>\n{{"name": "weather", "arguments": {{"a": {"[" * 3000 + "]" * 3000}}}}}\n</tool_call>'
    found = answer(CHAT, {**HELLO, "tools": [TOOL]}, says(text))
    assert found["calls"] == [{"function": {"name": "weather", "arguments": {}}}]


def test_an_unknown_path_is_an_error_in_the_shape_of_this_api() -> None:
    found = send("GET", "/api/nothing")
    assert (found.status_code, found.json()["code"]) == (404, "not_found")
    assert isinstance(found.json()["error"], str)


def test_a_schema_that_the_length_cuts_is_in_the_headers_too() -> None:
    body = {**HELLO, "format": "json", "stream": False, "options": {"num_predict": 1}}
    call = ask(CHAT, body, FakeEngine(says("one two three")))
    assert (call.json["done_reason"], call.headers["warning"].partition(":")[0]) == (
        "length",
        '299 - "cut at its length',
    )
    assert "format" in call.headers["warning"]
    whole = ask(CHAT, {**HELLO, "format": "json", "stream": False}, FakeEngine(says("one")))
    assert "warning" not in whole.headers


def test_a_model_says_what_it_is_and_what_it_can_do() -> None:
    found = send("POST", "/api/show", {"model": "tiny_chat:latest"}, settings=ServerSettings()).json()
    config = FakeEngine().config
    assert found["model_info"]["general.architecture"] == found["details"]["family"] == config.model_type
    assert found["model_info"][f"{config.model_type}.context_length"] == FakeEngine().max_model_len
    assert found["capabilities"] == ["completion", "tools"]
    named = send("POST", "/api/show", {"name": "tiny_chat"}, settings=ServerSettings())
    assert named.json() == found
    assert send("POST", "/api/show", {"model": "other"}).status_code == 404


def test_a_loaded_model_runs_and_is_never_unloaded() -> None:
    engine = FakeEngine()
    assert send("GET", "/api/ps", engine=engine).json() == {"models": []}
    engine.ready_info = Ready(engine.max_model_len, 8, 16, "cpu", "float32", kv_cache_bytes=1000)
    (model,) = send("GET", "/api/ps", engine=engine, settings=ServerSettings()).json()["models"]
    assert (model["name"], model["size"], model["size_vram"]) == ("tiny_chat", engine.config.bytes + 1000, 0)

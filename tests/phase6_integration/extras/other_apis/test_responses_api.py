"""/v1/responses: OpenAI's Responses API, in the official client's types."""

import json

import pytest

from phase0_request.request import FinishReason, Request
from phase6_integration.api.settings import ServerSettings
from phase6_integration.app import create_app
from tests.phase6_integration.asgi import Call
from tests.phase6_integration.fake_engine import FakeEngine, says
from tests.phase6_integration.responses import PATH, TOOL, answer, ask, events_of, kinds, run, stream

pytestmark = pytest.mark.usefixtures("one_tokenizer")


# Answers.


def test_an_answer_is_a_message_of_output_text() -> None:
    found = answer({"input": "Hello", "metadata": {"a": "b"}, "user": "u"}, says("one two three"))
    assert found["status"] == "completed"
    (item,) = found["output"]
    assert (item["type"], item["role"], item["status"]) == ("message", "assistant", "completed")
    assert item["content"] == [{"type": "output_text", "text": "one two three", "annotations": [], "logprobs": []}]
    assert found["id"].startswith("resp_")
    assert item["id"].startswith("msg_")
    assert (found["metadata"], found["user"]) == ({"a": "b"}, "u")


def test_an_answer_that_is_cut_is_incomplete() -> None:
    found = answer({"input": "Hello", "max_output_tokens": 2}, says("one two three"))
    assert found["status"] == "incomplete"
    assert found["incomplete_details"] == {"reason": "max_output_tokens"}
    assert found["completed_at"] is None
    assert found["output"][0]["status"] == "incomplete"
    assert found["output"][0]["content"][0]["text"] == "one two"
    assert found["usage"]["output_tokens"] == 2


def test_an_empty_answer_is_an_empty_message() -> None:
    found = answer({"input": "Hello"}, says(""))["output"]
    streamed = stream({"input": "Hello"}, says(""))
    assert kinds(streamed) == [
        "created",
        "in_progress",
        *(kind for kind in MESSAGE if "delta" not in kind),
        "completed",
    ]
    for (item,) in (found, streamed[-1]["response"]["output"]):
        assert item["content"] == [{"type": "output_text", "text": "", "annotations": [], "logprobs": []}]


def test_the_usage_counts_as_that_of_chat() -> None:
    async def test() -> None:
        engine = FakeEngine(says("one two three"))
        engine.cached = 4
        app = create_app(engine, ServerSettings())
        chat = {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]}
        async with Call(app, "/v1/chat/completions", chat) as call:
            pass
        async with Call(app, PATH, {"input": "Hello", "instructions": "Be brief."}) as own:
            pass
        theirs, ours = call.json["usage"], own.json["usage"]
        assert ours["input_tokens"] == theirs["prompt_tokens"]
        assert ours["output_tokens"] == theirs["completion_tokens"]
        assert ours["total_tokens"] == theirs["total_tokens"]
        assert ours["input_tokens_details"]["cached_tokens"] == 4
        prompts = [request.prompt_tokens for request in engine.submitted]
        assert prompts[0] == prompts[1], "instructions are the system message"

    run(test)


def test_what_samples_a_chat_samples_a_response() -> None:
    async def test() -> None:
        engine = FakeEngine()
        sampling = {"temperature": 0.5, "top_p": 0.9, "top_k": 7, "seed": 3, "stop": ["x"], "frequency_penalty": 1}
        app = create_app(engine, ServerSettings())
        async with Call(app, "/v1/chat/completions", {"messages": HELLO, "max_tokens": 5, **sampling}):
            pass
        async with Call(app, PATH, {"input": HELLO, "max_output_tokens": 5, **sampling}):
            pass
        chat, own = engine.submitted
        assert own.params == chat.params
        assert own.prompt_tokens == chat.prompt_tokens

    run(test)


HELLO = [{"role": "user", "content": "Hello"}]


def test_logprobs_are_those_of_chat() -> None:
    async def test() -> None:
        app = create_app(FakeEngine(says("one two three")), ServerSettings())
        asked = {"messages": HELLO, "logprobs": True, "top_logprobs": 2}
        async with Call(app, "/v1/chat/completions", asked) as chat:
            pass
        include = ["message.output_text.logprobs", "reasoning.encrypted_content"]
        body = {"input": HELLO, "include": include, "top_logprobs": 2}
        async with Call(app, PATH, body) as own:
            pass
        async with Call(app, PATH, {**body, "stream": True}) as streamed:
            pass
        expected = chat.json["choices"][0]["logprobs"]["content"]
        events = events_of(streamed)
        deltas = [event for event in events if event["type"] == "response.output_text.delta"]
        assert len(expected) == 3
        for entries in (
            own.json["output"][0]["content"][0]["logprobs"],
            [one for delta in deltas for one in delta["logprobs"]],
            events[-1]["response"]["output"][0]["content"][0]["logprobs"],
        ):
            assert entries == expected

    run(test)


# Streams.

MESSAGE = ["output_item.added", "content_part.added", "output_text.delta"]
MESSAGE += ["output_text.done", "content_part.done", "output_item.done"]


def test_a_stream_has_the_documented_events_in_their_order() -> None:
    events = stream({"input": "Hello"}, says("one two three"))
    assert kinds(events) == ["created", "in_progress", *MESSAGE, "completed"]
    created, progress, added, part, *deltas, done, part_done, item_done, completed = events
    assert created["response"] == progress["response"]
    assert (created["response"]["status"], created["response"]["output"]) == ("in_progress", [])
    assert (added["item"]["status"], added["item"]["content"]) == ("in_progress", [])
    assert part["part"]["text"] == ""
    assert all(delta["delta"] for delta in deltas), "no delta is empty"
    text = "".join(delta["delta"] for delta in deltas)
    assert text == done["text"] == part_done["part"]["text"] == "one two three"
    assert item_done["item"] == completed["response"]["output"][0]
    assert item_done["item"]["content"] == [part_done["part"]]
    assert {event["item_id"] for event in (part, *deltas, done, part_done)} == {item_done["item"]["id"]}
    assert completed["response"]["usage"]["output_tokens"] == 4


def test_the_last_event_of_a_stream_is_the_whole_answer() -> None:
    body = {"input": "Hello", "instructions": "Be brief.", "temperature": 0.5, "tool_choice": "none"}
    whole, last = answer(body, says("one two")), stream(body, says("one two"))[-1]["response"]
    for found in (whole, last):
        found["output"][0]["id"] = found["id"] = ""
        found["created_at"] = found["completed_at"] = 0
    assert last == whole


def test_a_stream_that_is_cut_ends_with_incomplete() -> None:
    events = stream({"input": "Hello", "max_output_tokens": 2}, says("one two three"))
    assert kinds(events) == ["created", "in_progress", *MESSAGE, "incomplete"]
    assert events[-2]["item"]["status"] == "incomplete"
    assert events[-1]["response"]["incomplete_details"] == {"reason": "max_output_tokens"}


@pytest.mark.parametrize("reason", [FinishReason.ERROR, FinishReason.TIMEOUT])
def test_a_stream_that_fails_ends_with_the_error_and_failed(reason: FinishReason) -> None:
    def script(request: Request) -> list[int | FinishReason]:
        return [*request.prompt_tokens[:3], reason]

    *begun, error, failed = stream({"input": "Hello"}, script)
    code = {FinishReason.ERROR: "internal_error", FinishReason.TIMEOUT: "deadline_passed"}[reason]
    assert (error["type"], error["code"]) == ("error", code)
    assert failed["type"] == "response.failed"
    assert failed["response"]["status"] == "failed"
    assert failed["response"]["error"] == {"code": "server_error", "message": error["message"]}
    assert failed["response"]["output"][0]["status"] == "incomplete"
    assert kinds(begun) == ["created", "in_progress", *MESSAGE[:3]]
    assert "a reason that no client may see" not in json.dumps([error, failed])


@pytest.mark.parametrize("stream", [False, True])
def test_what_fails_before_the_first_token_has_a_status(stream: bool) -> None:
    call = ask({"input": "Hello", "stream": stream}, lambda _: [FinishReason.ERROR])
    assert (call.status, call.json["error"]["code"]) == (500, "internal_error")


def test_a_failure_after_comments_begins_the_stream_first() -> None:
    async def test() -> None:
        engine = FakeEngine(lambda _: [FinishReason.ERROR])
        engine.room.clear()
        app = create_app(engine, ServerSettings(keepalive=0.001))
        async with Call(app, PATH, {"input": "Hello", "stream": True}) as call:
            await call.until(lambda call: b": keep-alive" in call.content)
            engine.room.set()
        assert kinds(events_of(call)) == ["created", "in_progress", "error", "failed"]

    run(test)


# The path of every answer: aborts, slow readers, memory.


def test_an_answer_that_can_never_fit_names_the_field_of_its_length() -> None:
    call = ask({"input": "Hello", "top_logprobs": 20}, max_buffered_bytes=1 << 20)
    assert (call.status, call.json["error"]["code"]) == (400, "answer_too_large")
    assert call.json["error"]["param"] == "max_output_tokens"


# Calls and reasoning in the answer.

TOOLS = [TOOL, {"type": "function", "name": "time"}]
ASKED = {"input": "Hello", "tools": TOOLS, "max_output_tokens": 200}
CALLS = (
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>'
)
SAYS = says(f"<think>Hm.</think>Let me see.\n{CALLS}")


def test_calls_and_reasoning_are_items_of_their_own() -> None:
    reasoning, message, *calls = answer(ASKED, SAYS, reasoning_parser="deepseek_r1")["output"]
    assert (reasoning["type"], reasoning["content"]) == ("reasoning", [{"type": "reasoning_text", "text": "Hm."}])
    assert message["content"][0]["text"] == "Let me see."
    assert [(call["name"], call["arguments"]) for call in calls] == [("weather", '{"city": "Rome"}'), ("time", "{}")]
    assert len({item["id"] for item in (reasoning, message, *calls)}) == 4
    assert len({call["call_id"] for call in calls}) == 2


def test_calls_and_reasoning_are_streamed_item_by_item() -> None:
    whole = answer(ASKED, SAYS, reasoning_parser="deepseek_r1")
    events = stream(ASKED, SAYS, reasoning_parser="deepseek_r1")
    reasoning = [kind.replace("output_text", "reasoning_text") for kind in MESSAGE]
    call = ["output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"]
    assert kinds(events) == ["created", "in_progress", *reasoning, *MESSAGE, *call, *call, "completed"]
    names = ("output_text", "reasoning_text", "function_call_arguments")
    for index, item in enumerate(events[-1]["response"]["output"]):
        mine = [event for event in events if event.get("output_index") == index]
        (done,) = (event for event in mine if event["type"] in [f"response.{name}.done" for name in names])
        deltas = [event["delta"] for event in mine if event["type"].endswith(".delta")]
        assert "".join(deltas) == done.get("text", done.get("arguments"))
        assert mine[-1]["item"] == item
    for one, two in zip(whole["output"], events[-1]["response"]["output"], strict=True):
        assert {**one, "id": "", "call_id": ""} == {**two, "id": "", "call_id": ""}

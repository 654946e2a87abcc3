"""What is refused, by what name, and in what words. `test_request_fields.py` has every field, a value at a time."""

import asyncio
from typing import Any

import httpx
import pytest

from phase6_integration.api.settings import ServerSettings
from tests.phase6_integration.fake_engine import FakeEngine, client
from tests.phase6_integration.posting import BODIES, CHAT, COMPLETE, HELLO, PROMPT, SETTINGS, error_of, post


def test_all_refused_fields_are_in_one_error_with_the_nearest_names() -> None:
    error = error_of(post(CHAT, {**HELLO, "temprature": 1, "functions": [{}], "max_token": 5, "qqq": 0}))
    assert (error["param"], error["code"]) in [("temprature", "unknown_field"), ("functions", "unsupported_field")]
    for words in ("'temprature'", "'temperature'", "'functions'", "'max_token'", "'max_tokens'", "'qqq'"):
        assert words in error["message"]
    many = error_of(post(COMPLETE, {**PROMPT, **{f"q{i}": i for i in range(500)}}))
    assert "484 more" in many["message"]


def test_messages_come_back_as_clients_got_them() -> None:
    answer = {
        "role": "assistant",
        "content": "Hi",
        "name": "me",
        "type": "message",
        "refusal": None,
        "annotations": [],
        "audio": None,
        "parsed": None,
        "reasoning_content": None,
        "provider_specific_fields": {"a": 1},
        "function_call": None,
        "tool_calls": None,
        "whatever": [1],
    }
    part = {"type": "text", "text": "More", "cache_control": {"type": "ephemeral"}}
    for again in (answer, {**answer, "tool_calls": []}):
        messages = [*HELLO["messages"], again, {"role": "user", "content": [part]}]
        assert post(CHAT, {"messages": messages, "max_tokens": 2}).status_code == 200
    call = {"name": "f", "arguments": "{}"}
    error = error_of(post(CHAT, {"messages": [*HELLO["messages"], {**answer, "function_call": call}]}))
    assert (error["param"], error["code"]) == ("messages.1.function_call", "unsupported_field")


def test_unknown_fields_may_be_ignored_with_one_warning_each(caplog: pytest.LogCaptureFixture) -> None:
    async def send() -> list[int]:
        async with client(FakeEngine(), ServerSettings(allow_unknown_fields=True)) as http:
            bodies = [{**PROMPT, "qqq": 1}, {**PROMPT, "qqq": [2], "other": 1}, {**PROMPT, "qqq": 1, "n": "1"}]
            return [(await http.post(COMPLETE, json=body)).status_code for body in bodies]

    with caplog.at_level("WARNING"):
        assert asyncio.run(send()) == [200, 200, 400]
    warned = [vars(record)["fields"]["field"] for record in caplog.records if "fields" in vars(record)]
    assert sorted(warned) == ["other", "qqq"]


@pytest.mark.parametrize("name", ["=text", "=", "[key]", "", "a.b", "0", "new\nline"])
def test_an_unknown_field_is_named_in_the_error(name: str) -> None:
    bodies = ({**PROMPT, name: 1}, {**PROMPT, "stream": True, "stream_options": {name: 1}})
    for body, param in zip(bodies, (name, f"stream_options.{name}"), strict=True):
        error = error_of(post(COMPLETE, body))
        assert (error["code"], error["param"]) == ("unknown_field", param)
        assert repr(param) in error["message"]


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "file", "video_url"])
def test_content_that_is_no_text_is_refused_by_its_name(kind: str) -> None:
    part = {"type": kind, kind: {"url": "data:,"}}
    content = [{"type": "text", "text": "Look"}, part]
    error = error_of(post(CHAT, {"messages": [{"role": "user", "content": content}]}))
    assert kind in error["message"]
    assert error["param"].startswith("messages.0.content.1")


def test_what_was_sent_is_not_repeated() -> None:
    secret = "correct-horse-battery"
    for body in (
        {**PROMPT, "temperature": secret},
        {**PROMPT, "stop": [secret * 20]},
        {**PROMPT, "prompt": {"a": secret}},
        {**PROMPT, "model": secret},
        {**PROMPT, "logit_bias": {"1": secret}},
    ):
        assert secret not in post(COMPLETE, body).text


def test_too_many_choices_are_refused_before_anything_is_tokenized(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = FakeEngine()
    monkeypatch.setattr(engine.tokenizer, "encode", lambda *_: pytest.fail("it was tokenized"))
    error = error_of(post(COMPLETE, {"prompt": ["a", "b", "c"], "n": 3}, engine))
    assert (error["param"], error["code"]) == ("n", "conflicting_values")
    assert "8" in error["message"]
    assert "3 x 3" in error["message"]


def test_prompt_logprobs_are_limited_before_anything_is_computed() -> None:
    async def send(**asked: Any) -> httpx.Response:
        async with client(engine, ServerSettings(max_scores=24)) as http:
            return await http.post(COMPLETE, json={"echo": True, "max_tokens": 1, "logprobs": 1, **asked})

    engine = FakeEngine()
    for asked in ({"prompt": [5] * 13}, {"prompt": [[5] * 6, [5] * 7]}, {"prompt": [5] * 7, "n": 2}):
        error = error_of(asyncio.run(send(**asked)))
        assert (error["param"], error["code"]) == ("logprobs", "conflicting_values")
        assert "24" in error["message"]
    assert engine.submitted == []
    for asked in ({"prompt": [[5] * 6] * 2}, {"prompt": [5] * 24, "logprobs": 0}, {"prompt": [5] * 99, "echo": False}):
        assert asyncio.run(send(**asked)).status_code == 200


CONFLICTS: list[tuple[str, dict[str, Any], str]] = [
    (COMPLETE, {"max_tokens": 0}, "max_tokens"),
    (COMPLETE, {"min_tokens": 3}, "min_tokens"),
    (COMPLETE, {"stream": True, "prompt_logprobs": 0}, "prompt_logprobs"),
    (CHAT, {"stream": True, "prompt_logprobs": 1}, "prompt_logprobs"),
    (COMPLETE, {"stream_options": {"include_usage": True}}, "stream_options"),
    (CHAT, {"max_completion_tokens": 3}, "max_tokens"),
    (CHAT, {"top_logprobs": 2}, "top_logprobs"),
    (CHAT, {"top_logprobs": 2, "logprobs": False}, "top_logprobs"),
    (CHAT, {"stream": False, "stream_options": {"include_usage": True}}, "stream_options"),
]


@pytest.mark.parametrize(("path", "given", "param"), CONFLICTS)
def test_fields_that_do_not_go_together(path: str, given: dict[str, Any], param: str) -> None:
    response = post(path, {**BODIES[path], **given})
    assert response.status_code == 400
    error = error_of(response)
    assert (error["param"], error["code"]) == (param, "conflicting_values")


def test_a_priority_is_not_accepted_and_ignored() -> None:
    async def send(policy: str) -> list[tuple[int, str | None]]:
        found = []
        async with client(FakeEngine(scheduling_policy=policy), SETTINGS) as http:
            for priority in (0, 3):
                response = await http.post("/v1/completions", json={"prompt": "x", "priority": priority})
                found.append((response.status_code, response.json().get("error", {}).get("param")))
        return found

    assert asyncio.run(send("priority")) == [(200, None), (200, None)]
    assert asyncio.run(send("fcfs")) == [(200, None), (400, "priority")]

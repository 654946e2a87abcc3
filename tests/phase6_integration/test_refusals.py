"""Requests that are refused as a whole: bodies that are not JSON, lists and numbers that are too long, fields that are
unknown or exclude each other. `test_request_fields.py` has every field, a value at a time."""

import asyncio
from typing import Any

import httpx2
import pytest

from phase6_integration import connect
from phase6_integration.api.settings import ServerSettings
from phase6_integration.api.tokenization import TokenizerPool
from phase6_integration.extras.fields import told_fields
from tests.phase6_integration.fake_engine import FakeEngine, client
from tests.phase6_integration.posting import BODIES, CHAT, COMPLETE, HELLO, PROMPT, SETTINGS, error_of, post, send

NOT_JSON = [
    *(b"", b"{", b"[]", b"null", b'{"prompt": "a",}', b'{"prompt": "a"} {}', b"{'prompt': 'a'}"),
    *(b'{"prompt": "\xff"}', b'{"prompt": "\\ud800"}', b'{"prompt": "\\udc00\\ud800"}'),
    *(b'{"prompt": "a", "temperature": %b}' % number for number in (b"NaN", b"-Infinity", b"1e999")),
    b'{"prompt": "a", "max_tokens": ' + b"9" * 5000 + b"}",
    b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    b'{"prompt": "a", "x": ' + b'{"a":' * 5000 + b"1" + b"}" * 5000 + b"}",
    b"\xef\xbb\xbf" + b'{"prompt": "a"}',
]


@pytest.mark.parametrize("body", NOT_JSON, ids=lambda body: repr(body[:32]))
def test_a_body_that_is_not_a_json_object_is_a_400(body: bytes) -> None:
    response = post(COMPLETE, body)
    assert response.status_code == 400
    assert error_of(response)["type"] == "invalid_request_error"


@pytest.mark.parametrize("digits", [400, 4300, 4301])
def test_numbers_of_thousands_of_digits_are_refused_in_a_short_message(digits: int) -> None:
    for field in (b"max_tokens", b"temperature", b"unknown", b"model"):
        for sign in (b"", b"-"):
            response = post(COMPLETE, b'{"prompt": "a", "' + field + b'": ' + sign + b"9" * digits + b"}")
            assert response.status_code == 400
            assert len(error_of(response)["message"]) < 200


def test_of_a_field_given_twice_the_last_counts() -> None:
    engine = FakeEngine()
    assert post(COMPLETE, b'{"prompt": "a", "max_tokens": 9, "max_tokens": 2}', engine).status_code == 200
    assert engine.submitted[0].params.max_tokens == 2


USER: dict[str, Any] = {"role": "user", "content": "x"}
NO_TEXT: dict[str, Any] = {**USER, "content": 5}


def content(*parts: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(parts)}]}


def part(kind: str) -> dict[str, Any]:
    return {"type": kind, kind: {"url": "data:,"}}


REFUSED: list[tuple[str, dict[str, Any], str, list[str]]] = [  # with the field that is named, and words of the message
    # Of a long list the first wrong item is named: to find the others would delay every client.
    (COMPLETE, {"prompt": [-1] * 5000}, "prompt.0", []),
    (COMPLETE, {"prompt": [[-1] * 5000]}, "prompt.0.0", []),
    (COMPLETE, {"prompt": [[]] * 5000}, "prompt.0", []),
    (COMPLETE, {"prompt": [""] * 5000}, "prompt.0", []),
    (CHAT, {"messages": [NO_TEXT] * 5000}, "messages.0.content", []),
    (CHAT, content(*[5] * 5000), "messages.0.content.0", []),
    ("/tokenize", {"messages": [NO_TEXT] * 5000}, "messages.0.content", []),
    ("/detokenize", {"tokens": [-1] * 5000}, "tokens.0", []),
    # Both lengths are named.
    (COMPLETE, {"prompt": ["a"] * 9}, "prompt", ["at most 8", "got 1 x 9"]),
    (COMPLETE, {"prompt": []}, "prompt", ["at least 1", "got 0"]),
    (COMPLETE, {"prompt": [5, "text"]}, "prompt", ["of one kind: strings, token ids or lists of token ids"]),
    (COMPLETE, {"prompt": ["text", [5]]}, "prompt", ["of one kind: strings, token ids or lists of token ids"]),
    (COMPLETE, {"stop": ["a"] * 17}, "stop", ["at most 16", "got 17"]),
    (COMPLETE, {"logit_bias": dict.fromkeys(map(str, range(1025)), 1)}, "logit_bias", ["at most 1024"]),
    (COMPLETE, {"prompt": ""}, "prompt", ["at least 1", "got 0"]),
    (COMPLETE, {"user": "x" * 300}, "user", ["at most 256", "got 300"]),
    (CHAT, {"messages": [USER] * 4097}, "messages", ["at most 4096", "got 4097"]),
    (CHAT, {"messages": [*content(*[{"type": "text", "text": "x"}] * 1024)["messages"] * 2]}, "messages", ["1024"]),
    # Content that is no text is refused by its name.
    *(
        (CHAT, content({"type": "text", "text": "Look"}, part(kind)), "messages.0.content.1.type", [kind])
        for kind in ("image_url", "input_audio", "file", "video_url")
    ),
]


@pytest.mark.parametrize(("path", "given", "param", "words"), REFUSED)
def test_what_is_refused_is_named_and_nothing_is_tokenized(
    path: str, given: dict[str, Any], param: str, words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for method in ("encode", "chat", "decode"):
        monkeypatch.setattr(TokenizerPool, method, lambda *_: pytest.fail("it was tokenized"))
    response = post(path, {**BODIES.get(path, {}), **given})
    error = error_of(response)
    assert (response.status_code, error["param"]) == (400, param)
    assert [word for word in (*words, param.split(".")[0]) if word not in error["message"]] == []
    assert words or ". " not in error["message"]


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
    (COMPLETE, {"prompt": ["a", "b", "c"], "n": 3}, "n"),
]


@pytest.mark.parametrize(("path", "given", "param"), CONFLICTS)
def test_fields_that_do_not_go_together(path: str, given: dict[str, Any], param: str) -> None:
    response = post(path, {**BODIES[path], **given})
    error = error_of(response)
    assert (response.status_code, error["param"], error["code"]) == (400, param, "conflicting_values")


def test_all_refused_fields_are_in_one_error_with_the_nearest_names() -> None:
    error = error_of(post(CHAT, {**HELLO, "temprature": 1, "functions": [{}], "max_token": 5, "qqq": 0}))
    assert (error["param"], error["code"]) in [("temprature", "unknown_field"), ("functions", "unsupported_field")]
    for words in ("'temprature'", "'temperature'", "'functions'", "'max_token'", "'max_tokens'", "'qqq'"):
        assert words in error["message"]
    many = error_of(post(COMPLETE, {**PROMPT, **{f"q{i}": i for i in range(500)}}))
    assert "484 more" in many["message"]
    assert "5000 places" in error_of(post(COMPLETE, {**PROMPT, **{f"q{i}": i for i in range(5000)}}))["message"]


def test_names_of_other_servers_are_answered_with_ours() -> None:
    message = error_of(post(CHAT, {**HELLO, "n_predict": 5, "format": "json", "options": {}, "zzz": 1}))["message"]
    for words in ("here it is 'max_tokens'", "here it is 'response_format'", "'zzz' is not a field of this request"):
        assert words in message
    assert "did you mean" not in message, "a guess that is far from what was written misleads"


def test_all_wrong_fields_are_in_one_error() -> None:
    error = error_of(post(CHAT, {"messages": [{"role": "a robot", "content": ""}], "top_p": 3, "max_tokens": "ten"}))
    assert (error["code"], error["param"]) == ("invalid_value", "messages.0.role")
    for words in (
        "match pattern '^[a-zA-Z0-9_.-]{1,64}$', got a string",
        "top_p: Input should be",
        "got 3",
        "max_tokens",
        "got a string",
    ):
        assert words in error["message"]


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("/messages", "did you mean /v1/messages?"),
        ("/v1/v1/chat/completions", "did you mean /v1/chat/completions?"),
        ("/v1/chat/completions/", "did you mean /v1/chat/completions?"),
        ("/v1/rerank", "/v1/chat/completions, "),
    ],
)
def test_an_unknown_path_says_which_there_are(path: str, meant: str) -> None:
    assert meant in error_of(post(path, {}))["message"]


@pytest.mark.parametrize("name", ["=text", "=", "[key]", "", "a.b", "0", "new\nline"])
def test_an_unknown_field_is_named_in_the_error(name: str) -> None:
    bodies = ({**PROMPT, name: 1}, {**PROMPT, "stream": True, "stream_options": {name: 1}})
    for body, param in zip(bodies, (name, f"stream_options.{name}"), strict=True):
        error = error_of(post(COMPLETE, body))
        assert (error["code"], error["param"]) == ("unknown_field", param)
        assert repr(param) in error["message"]


def test_unknown_fields_may_be_ignored_with_one_warning_each(caplog: pytest.LogCaptureFixture) -> None:
    async def send() -> list[int]:
        async with client(FakeEngine(), ServerSettings(allow_unknown_fields=True)) as http:
            bodies = [{**PROMPT, "qqq": 1}, {**PROMPT, "qqq": [2], "other": 1}, {**PROMPT, "qqq": 1, "n": "1"}]
            return [(await http.post(COMPLETE, json=body)).status_code for body in bodies]

    with caplog.at_level("WARNING"):
        assert asyncio.run(send()) == [200, 200, 400]
    warned = [vars(record)["fields"]["field"] for record in caplog.records if "fields" in vars(record)]
    assert sorted(warned) == ["other", "qqq"]


def test_messages_come_back_as_clients_got_them() -> None:
    nulls = dict.fromkeys(("refusal", "audio", "parsed", "reasoning_content", "function_call", "tool_calls"))
    more = {"type": "message", "annotations": [], "provider_specific_fields": {"a": 1}, "whatever": [1]}
    answer: dict[str, Any] = {"role": "assistant", "content": "Hi", "name": "me", **nulls, **more}
    last = content({"type": "text", "text": "More", "cache_control": {"type": "ephemeral"}})["messages"]
    last = [{**one, "whatever": [1]} for one in last]
    for again in (answer, {**answer, "tool_calls": []}):
        assert post(CHAT, {"messages": [*HELLO["messages"], again, *last], "max_tokens": 2}).status_code == 200
    call = {"name": "f", "arguments": "{}"}
    error = error_of(post(CHAT, {"messages": [*HELLO["messages"], {**answer, "function_call": call}]}))
    assert (error["param"], error["code"]) == ("messages.1.function_call", "unsupported_field")


def test_prompt_logprobs_are_limited_before_anything_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(told_fields, "MAX_SCORES", 24)

    async def send(**asked: Any) -> httpx2.Response:
        async with client(engine, ServerSettings()) as http:
            return await http.post(COMPLETE, json={"echo": True, "max_tokens": 1, "logprobs": 1, **asked})

    engine = FakeEngine()
    for asked in ({"prompt": [5] * 13}, {"prompt": [[5] * 6, [5] * 7]}, {"prompt": [5] * 7, "n": 2}):
        error = error_of(asyncio.run(send(**asked)))
        assert (error["param"], error["code"]) == ("logprobs", "conflicting_values")
        assert "24" in error["message"]
    assert engine.submitted == []
    for asked in ({"prompt": [[5] * 6] * 2}, {"prompt": [5] * 24, "logprobs": 0}, {"prompt": [5] * 99, "echo": False}):
        assert asyncio.run(send(**asked)).status_code == 200


def test_a_priority_is_not_accepted_and_ignored() -> None:
    async def send(policy: str) -> list[tuple[int, str | None]]:
        found = []
        async with client(FakeEngine(scheduling_policy=policy), SETTINGS) as http:
            for priority in (0, 3):
                response = await http.post(COMPLETE, json={"prompt": "x", "priority": priority})
                found.append((response.status_code, response.json().get("error", {}).get("param")))
        return found

    assert asyncio.run(send("priority")) == [(200, None), (200, None)]
    assert asyncio.run(send("fcfs")) == [(200, None), (400, "priority")]


@pytest.mark.parametrize("path", [COMPLETE, CHAT, "/v1/responses", "/v1/embeddings"])
def test_a_base_url_without_v1_is_served_too(path: str) -> None:
    assert post(path.removeprefix("/v1"), BODIES.get(path, {"input": "Hello"})).status_code == 200
    assert send("GET", "/models").json() == send("GET", "/v1/models").json()


def test_a_probe_with_a_slash_at_its_end_needs_no_key() -> None:
    keys = connect.settings(api_keys=("key",))
    for path, status in {"/health": 200, "/health/": 200, "/load": 401}.items():
        assert send("GET", path, settings=keys).status_code == status


def test_usage_in_every_chunk_is_a_part_of_include_usage() -> None:
    for options, expected in (({"continuous_usage_stats": True}, False), ({"include_usage": True}, True)):
        found = post(COMPLETE, {**PROMPT, "stream": True, "stream_options": options})
        assert (b'"usage"' in found.content) is expected

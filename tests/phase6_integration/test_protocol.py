"""What is refused, by what name, and in what words: every field of every request, one wrong value at a time."""

import asyncio
import json
from typing import Any

import httpx
import pytest

from phase6_integration.server.schemas import ChatRequest, CompletionRequest
from phase6_integration.server.settings import ServerSettings
from tests.phase6_integration.fake_engine import FakeEngine, client
from tests.phase6_integration.posting import BODIES, CHAT, COMPLETE, HELLO, PROMPT, SETTINGS, error_of, post

INFINITE = [float("nan"), float("inf"), float("-inf")]
WRONG: dict[str, list[Any]] = {  # of both kinds of completion
    "model": [5, "", "x" * 257, ["tiny_chat"]],
    "max_tokens": ["5", True, 1.5, -1, 2049, 10**30],
    "min_tokens": ["1", False, -1, 0.5, 2049],
    "temperature": ["1", True, -0.1, 100.1, *INFINITE],
    "top_p": [0, -1, 1.1, "1", *INFINITE],
    "top_k": [-2, 1.5, 1 << 31, "3"],
    "min_p": [-0.1, 1.1, True, *INFINITE],
    "n": [0, -1, 9, 1.5, True, "2"],
    "best_of": [0, 2, 9, "1", True, 1.5],
    "stop": [5, [5], [""], "", ["a"] * 17, "x" * 257, {"a": 1}, [["a"]]],
    "stop_token_ids": [5, ["5"], [-1], [4096], [True], [1.5], list(range(129))],
    "seed": [1.5, "1", True, 1 << 63, -(1 << 63) - 1],
    "presence_penalty": [-2.1, 2.1, "0", *INFINITE],
    "frequency_penalty": [-2.1, 2.1, "0", *INFINITE],
    "repetition_penalty": [0, 1e-45, -1, 10.1, "1", *INFINITE],
    "logit_bias": [[], {"a": 1}, {"-1": 1}, {"1": 101}, {"1": "1"}, {"4096": 1}, {"01": 1}, {"1": INFINITE[0]}],
    "ignore_eos": [1, "true", 0],
    "stream": [1, "true", 0],
    "stream_options": [True, {"include_usage": 1}, {"other": True}],
    "response_format": [
        *[
            "text",
            {},
            {"type": "json_schema"},
            {"type": "structural_tag"},
            {"type": "text", "json_schema": {"schema": {}}},
        ],
        *[{"type": "json_schema", "json_schema": {"schema": schema}} for schema in (5, True, [], None, "{", "5")],
        *[{"type": "json_object", "schema": 5}, {"type": "json_object", "other": 1}],
    ],
    "structured_outputs": [
        *[{}, {"json_object": False}, {"json": 5}, {"regex": 5}, {"regex": ""}, {"choice": []}, {"choice": "a"}],
        *[{"choice": [""]}, {"choice": [5]}, {"grammar": 5}, {"other": 1}, {"structural_tag": "{}"}, "json"],
        *[{"json": {}, "whitespace_pattern": pattern} for pattern in ("x", ".", "[^a]", r"\s*", "a|b", 5)],
    ],
    "guided_json": [5, True, "{", "5", [], {"x-guidance": {"lenient": True}}],
    "guided_regex": [5, ""],
    "guided_choice": [[], "a", [5], [""]],
    "guided_grammar": [5, ""],
    "guided_whitespace_pattern": ["x", 5],
    "priority": ["1", 1.5, (1 << 31) + 1, True],
    "cache_salt": ["", 5, "x" * 257],
    "user": [5, "x" * 257],
    "allowed_token_ids": [[], 5, ["5"], [-1], [4096], [True], [5] * 4097],
    "bad_words": ["x", [5], [""], ["x" * 257], ["x"] * 65, ["\U0001f600" * 200]],
    "include_stop_str_in_output": [1, "true"],
    "skip_special_tokens": [0, "false"],
    "add_special_tokens": [0, "false"],
    "truncate_prompt_tokens": [-2, "1", 1.5, True, 2049],
    "prompt_logprobs": [-1, 6, "1", True, 1.5],
    "return_token_ids": [1, "true"],
    "return_tokens_as_token_ids": [1, "true"],
    "request_id": ["", "with space", "x" * 129, 5, "new\nline", "\u00e9"],
}
WRONG_COMPLETION: dict[str, list[Any]] = {
    **WRONG,
    "prompt": [5, None, "", [], [""], [[]], [4096], [-1], [True], [1.5], ["a", 5], [5, "a"], [[5], "a"], {"a": 1}],
    "logprobs": [True, -1, 6, "1", 1.5],
    "echo": [1, "true"],
}
WRONG_CHAT: dict[str, list[Any]] = {
    **WRONG,
    "max_tokens": [*WRONG["max_tokens"], 0],
    "max_completion_tokens": [0, "5", True, 2049],
    "logprobs": [1, "true", 0],
    "top_logprobs": [True, -1, 6, "1"],
    "add_generation_prompt": [1, "no"],
    "chat_template_kwargs": [
        *[5, [], {"a b": 1}, {"messages": []}, {"tools": []}, {"chat_template": "x"}, {"tokenize": True}],
        {f"a{number}": 1 for number in range(65)},
    ],
    "continue_final_message": [1, "true"],
    "documents": [5, {}, ["text"]],
    "include_reasoning": [1, "yes"],
    "parallel_tool_calls": [1, "yes"],
    "reasoning_effort": ["much", 5, True],
    "tool_choice": [
        *["any", 5, [], {}, {"type": "function"}, {"type": "custom", "custom": {"name": "f"}}, {"name": "f"}],
        *["required", {"type": "function", "function": {"name": "f"}}],  # there are no tools
    ],
    "tools": [
        *[
            5,
            {},
            [5],
            [{}],
            ["f"],
            [{"type": "function"}],
            [{"type": "web_search"}],
            [{"type": "function", "name": "f"}],
        ],
        *[[{"type": "function", "function": {"name": name}}] for name in ("", "a b", "<|im_end|>", "x" * 65, 5, None)],
        *[[{"type": "function", "function": {"name": "f", "parameters": of}}] for of in (5, [], {"type": "array"})],
    ],
    "messages": [
        *[None, [], "Hello", {}, [5], [{}], [{"role": "user"}], [{"content": "x"}]],
        *[[{"role": role, "content": "x"}] for role in ("function", "nobody", 5)],
        *[[{"role": "user", "content": content}] for content in (5, None, [], [5], [{"type": "text"}], {})],
        *[[{"role": "tool", "content": content}] for content in (None, 5, {})],
        *[
            [{"role": "assistant", "tool_calls": calls}]
            for calls in (5, {}, [5], [{}], [{"type": "custom", "id": "a"}])
        ],
        [{"role": "user", "content": "x"}] * 5,
    ],
}
TABLES = {COMPLETE: (CompletionRequest, WRONG_COMPLETION), CHAT: (ChatRequest, WRONG_CHAT)}
CASES = [(path, field, value) for path, (_, table) in TABLES.items() for field in table for value in table[field]]


# Fields of OpenAI's and vLLM's APIs that this server does not have: the values that change nothing, and one that would.
HINTS = [
    "guided_decoding_backend",
    "metadata",
    "prompt_cache_key",
    "prompt_cache_retention",
    "safety_identifier",
    "service_tier",
    "store",
]
FOREIGN: dict[str, tuple[list[Any], Any]] = {
    "early_stopping": ([False], True),
    "kv_transfer_params": ([{}], {"do_remote_prefill": True}),
    "length_penalty": ([1, 1.0], 2.0),
    "logits_processors": ([[]], ["x"]),
    "prompt_embeds": ([], "AAAA"),
    "spaces_between_special_tokens": ([True, False], 1),
    "use_beam_search": ([False], True),
    "vllm_xargs": ([{}], {"a": 1}),
}
FOREIGN_TO_COMPLETIONS = {**FOREIGN, "suffix": ([""], "end")}
FOREIGN_TO_CHATS: dict[str, tuple[list[Any], Any]] = {
    **FOREIGN,
    "audio": ([], {"voice": "a", "format": "mp3"}),
    "chat_template": ([], "{{ messages }}"),
    "echo": ([False], True),
    "function_call": (["none", "auto"], {"name": "f"}),
    "functions": ([[]], [{"name": "f"}]),
    "mm_processor_kwargs": ([{}], {"a": 1}),
    "modalities": ([[], ["text"]], ["text", "audio"]),
    "prediction": ([], {"type": "content", "content": "a"}),
    "web_search_options": ([], {}),
}
LIMITED = {COMPLETE: FOREIGN_TO_COMPLETIONS, CHAT: FOREIGN_TO_CHATS}
NO_EFFECT = {COMPLETE: HINTS, CHAT: [*HINTS, "verbosity"]}


@pytest.mark.parametrize("path", TABLES)
def test_no_field_is_left_out_of_the_tables(path: str) -> None:
    model, table = TABLES[path]
    assert {*table, *LIMITED[path], *NO_EFFECT[path]} == set(model.model_fields)


@pytest.mark.parametrize("path", TABLES)
def test_what_changes_nothing_is_no_reason_to_refuse(path: str) -> None:
    bodies = [{name: value} for name, (harmless, _) in LIMITED[path].items() for value in (None, *harmless)]
    bodies += [{name: value} for name in NO_EFFECT[path] for value in (None, True, "x", {"a": ["b"]})]
    bodies.append({"stream": True, "stream_options": {"include_obfuscation": False}})

    async def send() -> list[str]:
        async with client(FakeEngine(), SETTINGS) as http:
            answers = [(body, await http.post(path, json={**BODIES[path], **body})) for body in bodies]
        return [f"{body}: {answer.text}" for body, answer in answers if answer.status_code != 200]

    assert asyncio.run(send()) == []


@pytest.mark.parametrize("path", TABLES)
def test_what_would_change_the_answer_and_is_not_supported_is_refused(path: str) -> None:
    async def send() -> list[str]:
        wrong = []
        async with client(FakeEngine(), SETTINGS) as http:
            for name, (_, value) in LIMITED[path].items():
                answer = await http.post(path, json={**BODIES[path], name: value})
                if answer.status_code != 400 or error_of(answer)["code"] != "unsupported_field":
                    wrong.append(f"{name}: {answer.text}")
                elif error_of(answer)["param"] != name or name not in error_of(answer)["message"]:
                    wrong.append(f"{name} is not named: {answer.text}")
        return wrong

    assert asyncio.run(send()) == []


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


def test_a_wrong_value_is_a_400_that_names_its_field() -> None:
    async def send() -> list[str]:
        engine, wrong = FakeEngine(), []
        async with client(engine, SETTINGS) as http:
            for path, field, value in CASES:
                content = json.dumps({**BODIES[path], field: value}).encode()
                response = await http.post(path, content=content, headers={"content-type": "application/json"})
                error = error_of(response)
                named = str(error["param"]).split(".")[0]
                if (response.status_code, named) != (400, field) or field not in error["message"]:
                    wrong.append(f"{path} {field}={value!r}: {response.status_code} {error}")
        assert engine.submitted == []
        return wrong

    assert len(CASES) > 250
    assert asyncio.run(send()) == []


RIGHT: dict[str, list[Any]] = {
    "temperature": [0, 0.0, 2, 100],
    "top_p": [1, 0.001],
    "top_k": [-1, 0, 5],
    "n": [1, 8],
    "best_of": [1],
    "stop": ["x", ["x"] * 16, []],
    "stop_token_ids": [[], [0, 4095]],
    "seed": [-(1 << 63), (1 << 63) - 1],
    "logit_bias": [{}, {"0": -100, "4095": 100.0}],
    "response_format": [
        *[{"type": "text"}, {"type": "text", "json_schema": None}, {"type": "json_object"}],
        {"type": "json_schema", "json_schema": {"name": "any", "schema": {}, "strict": True, "description": "x"}},
    ],
    "structured_outputs": [
        *[{"json": {}}, {"json": "{}"}, {"regex": "a"}, {"choice": ["a"]}, {"grammar": "start: /a/"}],
        *[{"json_object": True}, {"json": {}, "whitespace_pattern": r"[ \n]{0,4}|\t*"}],
        {"json": {}, "disable_any_whitespace": True, "disable_fallback": True, "regex": None},
    ],
    "guided_json": [{}, '{"type": "object"}'],
    "priority": [-5],
    "cache_salt": ["tenant"],
    "user": ["", "someone"],
    "allowed_token_ids": [[5], [0, 4095]],
    "bad_words": [[], ["x"] * 64, [" "], ["\n"]],
    "truncate_prompt_tokens": [-1, 1],
    "prompt_logprobs": [0, 5],
    "request_id": ["mine-1"],
}


@pytest.mark.parametrize("path", TABLES)
def test_the_edges_of_what_is_allowed_are_allowed_and_null_is_not_given(path: str) -> None:
    async def send() -> list[str]:
        wrong = []
        async with client(FakeEngine(scheduling_policy="priority"), SETTINGS) as http:
            nulls = {field: [None] for field in TABLES[path][1] if field not in ("prompt", "messages")}
            for field, values in [*RIGHT.items(), *nulls.items()]:
                for value in values:
                    response = await http.post(path, json={**BODIES[path], field: value})
                    if response.status_code != 200:
                        wrong.append(f"{field}={value!r}: {response.text}")
        return wrong

    assert asyncio.run(send()) == []


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


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize"])
def test_the_other_routes_refuse_alike(path: str) -> None:
    field = {"/tokenize": "prompt", "/detokenize": "tokens"}[path]
    wrong: list[dict[str, Any]] = [{}, {field: [], "other": 1}]
    for body in [*wrong, *({field: value} for value in (5, None, [-1], [4096], ["x"]))]:
        response = post(path, body)
        assert response.status_code == 400
        assert error_of(response)["param"]


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


def test_the_user_is_in_the_access_log(caplog: pytest.LogCaptureFixture) -> None:
    async def send() -> None:
        async with client(FakeEngine(), SETTINGS) as http:
            await http.post("/v1/completions", json={"prompt": "x", "user": "someone"})

    with caplog.at_level("INFO"):
        asyncio.run(send())
    fields = [record.fields for record in caplog.records if record.name == "nanoserve.access"]  # type: ignore[attr-defined]
    assert [(line["user"], line["prompt_tokens"]) for line in fields] == [("someone", 1)]

"""Every field of both completion requests, one value at a time: what is refused, by its name, and what is allowed."""

import asyncio
import json
from typing import Any

import pytest

from phase6_integration.api.schemas import ChatRequest, CompletionRequest
from tests.phase6_integration.fake_engine import FakeEngine, client
from tests.phase6_integration.posting import BODIES, CHAT, COMPLETE, SETTINGS, error_of

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
    "allowed_token_ids": [[], 5, ["5"], [-1], [4096], [True]],
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
        [{"role": "user", "content": "x"}] * 4097,
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

"""Every field of both completion requests, one value at a time: what is refused, by its name, and what is allowed."""

import asyncio
import json
from typing import Any

import pytest

from phase6_integration.connect import create_app
from phase6_integration.extras.fields.request_fields import ChatRequest, CompletionRequest
from tests.phase6_integration.fake_engine import FakeEngine, client
from tests.phase6_integration.posting import BODIES, CHAT, COMPLETE, HELLO, SETTINGS, error_of

Values = tuple[list[Any], list[Any]]  # of a field: those that are refused, and the edges of those that are allowed
FLAG: Values = ([1, "true", 0], [False])


def integer(below: int, least: int, most: int, above: int) -> Values:
    return [below, above, 10**30, least + 0.5, str(least), True], [least, most]


def number(below: float, least: float, most: float, above: float) -> Values:
    return [below, above, str(least), True, float("nan"), float("inf"), float("-inf")], [least, most]


def text(longest: int) -> Values:
    return [5, "", "x" * (longest + 1)], ["x" * longest]


def schemas(*wrong: Any) -> list[Any]:
    return [{"type": "json_schema", "json_schema": {"schema": schema}} for schema in wrong]


def tool(name: Any, **more: Any) -> list[Any]:
    return [{"type": "function", "function": {"name": name, **more}}]


SHARED: dict[str, Values] = {
    "model": ([5, "", "x" * 257, ["tiny_chat"]], ["tiny_chat"]),
    "min_tokens": integer(-1, 0, 2, 2049),
    "temperature": number(-0.1, 0, 100, 100.1),
    "top_p": number(0, 0.001, 1, 1.1),
    "top_k": integer(-2, -1, (1 << 31) - 1, 1 << 31),
    "min_p": number(-0.1, 0, 1, 1.1),
    "n": integer(0, 1, 8, 9),
    "best_of": integer(0, 1, 1, 2),
    "stop": ([5, [5], [""], "", ["a"] * 17, "x" * 257, {"a": 1}, [["a"]]], ["x", ["x"] * 16, []]),
    "stop_token_ids": ([5, ["5"], [-1], [4096], [True], [1.5], list(range(129))], [[], [0, 4095]]),
    "seed": integer(-(1 << 63) - 1, -(1 << 63), (1 << 63) - 1, 1 << 63),
    "presence_penalty": number(-2.1, -2, 2, 2.1),
    "frequency_penalty": number(-2.1, -2, 2, 2.1),
    "repetition_penalty": number(1e-45, 0.01, 10, 10.1),  # of 1e-45 the logits are infinite: a 500 on demand
    "logit_bias": (
        [[], {"a": 1}, {"-1": 1}, {"1": 101}, {"1": "1"}, {"4096": 1}, {"01": 1}, {"1": float("nan")}],
        [{}, {"0": -100, "4095": 100.0}],
    ),
    "stream_options": ([True, {"include_usage": 1}, {"other": True}], []),
    "response_format": (
        [
            *("text", {}, {"type": "json_schema"}, {"type": "structural_tag"}, {"type": "sound"}),
            *({"type": "text", "json_schema": {"schema": {}}}, {"type": "json_object", "other": 1}),
            *({"type": "json_object", "schema": schema} for schema in (5, {"type": 123}, {"type": "hiccup"})),
            *schemas(5, True, [], None, "{", "5"),
        ],
        [
            *({"type": "text"}, {"type": "text", "json_schema": None}, {"type": "json_object"}),
            {"type": "json_schema", "json_schema": {"name": "any", "schema": {}, "strict": True, "description": "x"}},
        ],
    ),
    "structured_outputs": (
        [
            *({}, {"json_object": False}, {"json": 5}, {"regex": 5}, {"regex": ""}, {"choice": []}, {"choice": "a"}),
            *({"choice": [""]}, {"choice": [5]}, {"grammar": 5}, {"other": 1}, {"structural_tag": "{}"}, "json"),
            *({"json": {}, "whitespace_pattern": pattern} for pattern in ("x", ".", "[^a]", r"\S*", "a|b", 5)),
        ],
        [
            *({"json": {}}, {"json": "{}"}, {"regex": "a"}, {"choice": ["a"]}, {"grammar": "start: /a/"}),
            *({"json_object": True}, {"json": {}, "whitespace_pattern": r"[ \n]{0,4}|\t*"}),
            {"json": {}, "disable_any_whitespace": True, "disable_fallback": True, "regex": None},
        ],
    ),
    "guided_json": ([5, True, "{", "5", [], {"x-guidance": {"lenient": True}}], [{}, '{"type": "object"}']),
    "guided_regex": ([5, ""], []),
    "guided_choice": ([[], "a", [5], [""]], []),
    "guided_grammar": ([5, ""], []),
    "guided_whitespace_pattern": (["x", 5], []),
    "priority": (["1", 1.5, (1 << 31) + 1, True], [-5]),
    "cache_salt": text(256),
    "user": ([5, "x" * 257], ["", "x" * 256]),
    "allowed_token_ids": ([[], 5, ["5"], [-1], [4096], [True]], [[5], [0, 4095]]),
    "bad_words": (
        ["x", [5], [""], ["x" * 257], ["x"] * 65, ["\U0001f600" * 200]],
        [[], ["x"] * 64, [" "], ["\n"]],
    ),
    "truncate_prompt_tokens": integer(-2, -1, 1, 2049),
    "prompt_logprobs": integer(-1, 0, 5, 6),
    "request_id": (["", "with space", "x" * 129, 5, "new\nline", "\u00e9"], ["mine-1", "x" * 128]),
    **dict.fromkeys(("ignore_eos", "stream", "include_stop_str_in_output", "skip_special_tokens"), FLAG),
    **dict.fromkeys(("add_special_tokens", "return_token_ids"), FLAG),
}
COMPLETIONS: dict[str, Values] = {
    **SHARED,
    "max_tokens": integer(-2, -1, 2000, 2049),
    "prompt": (
        [5, None, "", [], [""], [[]], [4096], [-1], [True], [1.5], ["a", 5], [5, "a"], [[5], "a"], {"a": 1}],
        [],
    ),
    "logprobs": integer(-1, 0, 5, 6),
    "echo": FLAG,
}
CHATS: dict[str, Values] = {
    **SHARED,
    "max_tokens": integer(0, -1, 2000, 2049),
    "prediction": (
        ["a", {}, {"type": "content"}, {"type": "text", "content": "a"}, {"type": "content", "content": [5]}],
        [{"type": "content", "content": text} for text in ("", "a", [{"type": "text", "text": "a"}])],
    ),
    "max_completion_tokens": ([0, "5", True, 2049], []),
    "logprobs": FLAG,
    "top_logprobs": ([True, -1, 6, "1"], []),
    "chat_template_kwargs": (
        [
            *(5, [], {"a b": 1}, {"messages": []}, {"tools": []}, {"chat_template": "x"}, {"tokenize": True}),
            {f"a{number}": 1 for number in range(65)},
        ],
        [],
    ),
    "documents": ([5, {}, ["text"]], []),
    "reasoning_effort": (["much", 5, True], []),
    "tool_choice": (
        [
            *("any", 5, [], {}, {"type": "function"}, {"type": "custom", "custom": {"name": "f"}}, {"name": "f"}),
            *("required", {"type": "function", "function": {"name": "f"}}),  # there are no tools
        ],
        [],
    ),
    "tools": (
        [
            *(5, {}, [5], [{}], ["f"], [{"type": "function"}], [{"type": "web_search"}]),
            [{"type": "function", "name": "f"}],
            *(tool(name) for name in ("", "a b", "<|im_end|>", "x" * 65, 5, None)),
            *(tool("f", parameters=parameters) for parameters in (5, [], {"type": "array"})),
        ],
        [],
    ),
    "messages": (
        [
            *(None, [], "Hello", {}, [5], [{}], [{"role": "user"}], [{"content": "x"}], [*HELLO["messages"], {}]),
            *([{"role": role, "content": "x"}] for role in ("", "a b", "<|im_end|>", "x" * 65, 5, None)),
            *([{"role": "user", "content": content}] for content in (5, None, [], [5], [{"type": "text"}], {})),
            *([{"role": "tool", "content": content}] for content in (None, 5, {})),
            *([{"role": "assistant", "tool_calls": calls}] for calls in (5, {}, [5], [{}], [{"type": "custom"}])),
            [{"role": "user", "content": "x"}] * 4097,
        ],
        [],
    ),
    **dict.fromkeys(("add_generation_prompt", "include_reasoning", "parallel_tool_calls"), FLAG),
    "continue_final_message": ([1, "true"], []),
}
IDLE = ("No effect.", "Not supported; these values change nothing.")  # fields, as /openapi.json describes them
TABLES = {COMPLETE: (CompletionRequest, COMPLETIONS), CHAT: (ChatRequest, CHATS)}


# Fields of OpenAI's and vLLM's APIs that this server does not have: the values that change nothing, and one that would.
HINTS = [
    *("guided_decoding_backend", "metadata", "prompt_cache_key", "prompt_cache_retention", "safety_identifier"),
    *("service_tier", "store"),
]
FOREIGN: dict[str, tuple[list[Any], Any]] = {
    "early_stopping": ([False], True),
    "kv_transfer_params": ([{}], {"do_remote_prefill": True}),
    "length_penalty": ([1, 1.0], 2.0),
    "truncation_side": (["left"], "right"),
    "logits_processors": ([[]], ["x"]),
    "prompt_embeds": ([], "AAAA"),
    "return_tokens_as_token_ids": ([False], True),
    "spaces_between_special_tokens": ([True, False], 1),
    "use_beam_search": ([False], True),
    "vllm_xargs": ([{}], {"a": 1}),
}
FOREIGN_TO_CHATS: dict[str, tuple[list[Any], Any]] = {
    **FOREIGN,
    "audio": ([], {"voice": "a", "format": "mp3"}),
    "chat_template": ([], "{{ messages }}"),
    "echo": ([False], True),
    "function_call": (["none", "auto"], {"name": "f"}),
    "functions": ([[]], [{"name": "f"}]),
    "mm_processor_kwargs": ([{}], {"a": 1}),
    "modalities": ([[], ["text"]], ["text", "audio"]),
    "web_search_options": ([], {}),
}
LIMITED = {COMPLETE: {**FOREIGN, "suffix": ([""], "end")}, CHAT: FOREIGN_TO_CHATS}
NO_EFFECT = {COMPLETE: HINTS, CHAT: [*HINTS, "verbosity"]}


def answers(path: str, bodies: list[dict[str, Any]], engine: FakeEngine | None = None) -> list[tuple[int, str, Any]]:
    """Send each of these fields with a valid body: the status, the text of the response, and its error."""

    async def send() -> list[tuple[int, str, Any]]:
        found = []
        async with client(engine or FakeEngine(scheduling_policy="priority"), SETTINGS) as http:
            for fields in bodies:
                content = json.dumps({**BODIES[path], **fields}).encode()
                response = await http.post(path, content=content, headers={"content-type": "application/json"})
                error = error_of(response) if response.status_code != 200 else None
                found.append((response.status_code, response.text, error))
        return found

    return asyncio.run(send())


@pytest.mark.parametrize("path", TABLES)
def test_no_field_is_left_out_of_the_tables(path: str) -> None:
    model, table = TABLES[path]
    assert {*table, *LIMITED[path], *NO_EFFECT[path]} == set(model.model_fields)
    schema = create_app(FakeEngine(), SETTINGS).openapi()["components"]["schemas"][model.__name__]
    described = {name: about.get("description") for name, about in schema["properties"].items()}
    assert {name for name, about in described.items() if about not in IDLE} == set(table)
    assert schema["additionalProperties"] is False


@pytest.mark.parametrize("path", TABLES)
def test_a_wrong_value_is_a_400_that_names_its_field(path: str) -> None:
    engine = FakeEngine()
    cases = [(name, value) for name, (wrong, _) in TABLES[path][1].items() for value in wrong]
    assert len(cases) > 120
    for (name, value), (status, text, error) in zip(
        cases, answers(path, [{name: value} for name, value in cases], engine), strict=True
    ):
        named = str(error["param"]).split(".")[0] if error else None
        assert (status, named, name in text) == (400, name, True), f"{name}={value!r}: {text}"
    assert all(request.params.grammar for request in engine.submitted), "only the engine can refuse a grammar"


@pytest.mark.parametrize("path", TABLES)
def test_what_would_change_the_answer_and_is_not_supported_is_refused(path: str) -> None:
    cases = {name: value for name, (_, value) in LIMITED[path].items()}
    found = answers(path, [{name: value} for name, value in cases.items()])
    for name, (status, text, error) in zip(cases, found, strict=True):
        assert status == 400, f"{name}: {text}"
        assert (error["code"], error["param"], name in error["message"]) == ("unsupported_field", name, True)


@pytest.mark.parametrize("path", TABLES)
def test_the_edges_and_null_and_what_changes_nothing_are_allowed(path: str) -> None:
    bodies = [{name: value} for name, (_, allowed) in TABLES[path][1].items() for value in allowed]
    bodies += [{name: None} for name in TABLES[path][1] if name not in ("prompt", "messages")]
    bodies += [{name: value} for name, (harmless, _) in LIMITED[path].items() for value in (None, *harmless)]
    bodies += [{name: value} for name in NO_EFFECT[path] for value in (None, True, "x", {"a": ["b"]})]
    bodies.append({"stream": True, "stream_options": {"include_obfuscation": False}})
    found = zip(bodies, answers(path, bodies), strict=True)
    assert [f"{body}: {text}" for body, (status, text, _) in found if status != 200] == []

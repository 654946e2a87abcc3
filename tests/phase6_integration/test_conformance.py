"""The contract line by line: endpoints, fields, errors and streams, as clients rely on them."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from phase0_request.request import FinishReason
from phase6_integration.api.settings import ServerSettings
from phase6_integration.process.health import Health
from tests.phase6_integration.application import create_app
from tests.phase6_integration.fake_engine import FakeEngine, client, events, says
from tests.phase6_integration.running import error_of

KEY = "a-key-of-the-test"
HELLO = [{"role": "user", "content": "Hello"}]
COMPLETE = ("POST", "/v1/completions", {"prompt": "Hello"})
CHAT = ("POST", "/v1/chat/completions", {"messages": HELLO, "max_tokens": 4})
RESPONSES = ("POST", "/v1/responses", {"input": "Hello", "max_output_tokens": 4})
Request = tuple[str, str, Any]


def ask(
    request: Request,
    engine: FakeEngine | None = None,
    settings: ServerSettings | None = None,
    headers: dict[str, str] | None = None,
) -> httpx.Response:
    method, path, body = request

    async def send() -> httpx.Response:
        async with client(engine or FakeEngine(), settings or ServerSettings(template_timeout=60)) as http:
            response = await http.request(method, path, json=body, headers=headers)
            assert isinstance(response, httpx.Response)
            return response

    return asyncio.run(send())


# Endpoints.

ENDPOINTS: list[tuple[Request, str]] = [
    (COMPLETE, "application/json"),
    (CHAT, "application/json"),
    (RESPONSES, "application/json"),
    (("GET", "/v1/models", None), "application/json"),
    (("GET", "/v1/models/tiny_chat", None), "application/json"),
    (("POST", "/tokenize", {"prompt": "Hello"}), "application/json"),
    (("POST", "/detokenize", {"tokens": [5]}), "application/json"),
    (("GET", "/health", None), "application/json"),
    (("GET", "/ping", None), "application/json"),
    (("POST", "/ping", None), "application/json"),
    (("GET", "/load", None), "application/json"),
    (("GET", "/v1/load", None), "application/json"),
    (("GET", "/metrics", None), "text/plain"),
    (("GET", "/stats", None), "application/json"),
    (("GET", "/version", None), "application/json"),
    (("GET", "/", None), "text/html"),
    (("GET", "/openapi.json", None), "application/json"),
]


@pytest.mark.parametrize(("request_", "kind"), ENDPOINTS, ids=["".join(request[:2]) for request, _ in ENDPOINTS])
def test_every_endpoint_answers(request_: Request, kind: str) -> None:
    response = ask(request_, headers={"x-request-id": "mine"})
    assert response.status_code == 200
    assert response.headers["content-type"].split(";")[0] == kind
    assert response.headers["x-request-id"] == "mine"


def test_the_model_list_names_every_name() -> None:
    settings = ServerSettings(served_model_names=("one", "org/two"))
    listed = ask(("GET", "/v1/models", None), settings=settings).json()
    assert [model["id"] for model in listed["data"]] == ["one", "org/two"]
    assert ask(("GET", "/v1/models/org/two", None), settings=settings).json()["id"] == "org/two"
    assert {model["root"] for model in listed["data"]} == {"one"}
    assert {model["max_model_len"] for model in listed["data"]} == {2048}


# Fields.

SHARED = {
    *("model", "max_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p", "n", "stop", "stop_token_ids"),
    *("seed", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "logprobs", "stream"),
    *("stream_options", "ignore_eos", "priority", "user", "request_id", "cache_salt"),
    *("best_of", "allowed_token_ids", "bad_words", "include_stop_str_in_output", "skip_special_tokens"),
    *("add_special_tokens", "truncate_prompt_tokens", "prompt_logprobs", "return_token_ids"),
    "return_tokens_as_token_ids",
    *("response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar"),
    "guided_whitespace_pattern",
}
FIELDS = {
    "CompletionRequest": {*SHARED, "prompt", "echo"},
    "ChatRequest": {
        *(*SHARED, "messages", "max_completion_tokens", "top_logprobs", "add_generation_prompt"),
        *("tools", "tool_choice", "parallel_tool_calls", "include_reasoning", "reasoning_effort"),
        *("chat_template_kwargs", "continue_final_message", "documents"),
    },
    "StreamOptions": {"include_usage", "continuous_usage_stats"},
}


def schemas(**options: Any) -> dict[str, Any]:
    document = create_app(FakeEngine(), ServerSettings(**options)).openapi()
    found: dict[str, Any] = document["components"]["schemas"]
    return found


@pytest.mark.parametrize("name", FIELDS)
def test_the_fields_are_those_of_the_contract_and_no_others(name: str) -> None:
    schema = schemas()[name]
    idle = ("No effect.", "Not supported; these values change nothing.")
    working = {field for field, about in schema["properties"].items() if about.get("description") not in idle}
    assert working == FIELDS[name]
    assert schema["additionalProperties"] is False


def test_the_schema_asks_for_a_key_where_one_is_asked_for() -> None:
    settings = ServerSettings(api_keys=(KEY,))
    document = create_app(FakeEngine(), settings).openapi()
    routes = [(path, method) for path, methods in document["paths"].items() for method in methods]
    keyed = [route for route in routes if "security" in document["paths"][route[0]][route[1]]]
    refused = [route for route in routes if ask((route[1], route[0], None), None, settings).status_code == 401]
    assert keyed == refused != []
    assert "securitySchemes" not in create_app(FakeEngine(), ServerSettings()).openapi()["components"]


# Errors.


def failing(reason: FinishReason) -> Callable[[], FakeEngine]:
    return lambda: FakeEngine(lambda _: [reason])


def in_state(health: Health) -> Callable[[], FakeEngine]:
    def make() -> FakeEngine:
        engine = FakeEngine()
        engine.health, engine.reason = health, "OSError: no client may see /secret/place at 0x7f00"
        return engine

    return make


def full() -> FakeEngine:
    engine = FakeEngine(max_num_queued_reqs=1)
    engine._waiting.add("a waiting request")
    return engine


BAD = "invalid_request_error"
AWAY = "service_unavailable_error"
ERRORS: list[tuple[str, Request, Callable[[], FakeEngine], dict[str, str], tuple[int, str, str]]] = [
    ("bad value", (*COMPLETE[:2], {"prompt": "a", "n": 0}), FakeEngine, {}, (400, BAD, "invalid_value")),
    ("missing", (*COMPLETE[:2], {}), FakeEngine, {}, (400, BAD, "missing_field")),
    ("unknown field", (*COMPLETE[:2], {"prompt": "a", "x": 0}), FakeEngine, {}, (400, BAD, "unknown_field")),
    (
        "unsupported",
        (*CHAT[:2], {"messages": HELLO, "functions": [5]}),
        FakeEngine,
        {},
        (400, BAD, "unsupported_field"),
    ),
    ("long", (*COMPLETE[:2], {"prompt": [5] * 3000}), FakeEngine, {}, (400, BAD, "context_length_exceeded")),
    ("empty", (*COMPLETE[:2], {"prompt": ""}), FakeEngine, {}, (400, BAD, "invalid_value")),
    ("no key", COMPLETE, FakeEngine, {"authorization": ""}, (401, "authentication_error", "invalid_api_key")),
    ("model", (*COMPLETE[:2], {"prompt": "a", "model": "b"}), FakeEngine, {}, (404, BAD, "model_not_found")),
    ("route", ("GET", "/v2/models", None), FakeEngine, {}, (404, BAD, "not_found")),
    ("not served", ("POST", "/v1/embeddings", {"input": "a"}), FakeEngine, {}, (404, BAD, "not_found")),
    ("slash", ("GET", "/v1/models/", None), FakeEngine, {}, (404, BAD, "model_not_found")),
    ("method", ("GET", "/v1/completions", None), FakeEngine, {}, (405, BAD, "method_not_allowed")),
    ("deadline", COMPLETE, failing(FinishReason.TIMEOUT), {}, (408, "timeout_error", "deadline_passed")),
    ("large", (*COMPLETE[:2], {"prompt": "a" * 9000}), FakeEngine, {}, (413, BAD, "body_too_large")),
    ("kind", COMPLETE, FakeEngine, {"content-type": "text/plain"}, (415, BAD, "unsupported_media_type")),
    ("queue", COMPLETE, full, {}, (429, "rate_limit_error", "queue_full")),
    ("fault", COMPLETE, failing(FinishReason.ERROR), {}, (500, "server_error", "internal_error")),
    *(
        (f"{path} while {health.value}", request_, in_state(health), {}, (503, AWAY, health.value))
        for path, request_ in (("completions", COMPLETE), ("health", ("GET", "/health", None)))
        for health in Health
        if health is not Health.READY
    ),
]
OWN_HEADERS = {"www-authenticate": (401,), "allow": (405,), "retry-after": (429, 503)}


@pytest.mark.parametrize(
    ("request_", "make", "headers", "expected"), [case[1:] for case in ERRORS], ids=[case[0] for case in ERRORS]
)
def test_every_error_has_its_status_its_shape_and_its_headers(
    request_: Request, make: Callable[[], FakeEngine], headers: dict[str, str], expected: tuple[int, str, str]
) -> None:
    settings = ServerSettings(api_keys=(KEY,), max_body_bytes=9000)
    given = {"authorization": f"Bearer {KEY}", "x-request-id": "mine", **headers}
    response = ask(request_, make(), settings, given)
    error = error_of(response.json())
    assert (response.status_code, error["type"], error["code"]) == expected
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-request-id"] == "mine"
    for name, statuses in OWN_HEADERS.items():
        assert (name in response.headers) == (response.status_code in statuses)
    assert ("mine" in error["message"]) == (response.status_code == 500)
    assert "no client may see" not in response.text


def test_the_document_says_the_shape_of_every_error() -> None:
    document = create_app(FakeEngine(), ServerSettings()).openapi()
    for operation in (operation for path in document["paths"].values() for operation in path.values()):
        assert operation["responses"].keys() == {"200", "4XX", "5XX"}
        for status in ("4XX", "5XX"):
            content = operation["responses"][status]["content"]
            assert content == {"application/json": {"schema": {"$ref": "#/components/schemas/ErrorResponse"}}}
    schemas = document["components"]["schemas"]
    assert schemas["ErrorResponse"]["required"] == ["error"]
    assert schemas["Error"]["required"] == ["message", "type", "param", "code"]


# Streams.


@pytest.mark.parametrize("request_", [COMPLETE, CHAT])
def test_a_stream_has_no_usage_unless_it_is_asked_for(request_: Request) -> None:
    """`api/test_streaming` has its order, with usage."""
    method, path, body = request_
    response = ask((method, path, {**body, "stream": True}), FakeEngine(says("one two three")))
    *chunks, done = events(response.content)
    assert done == "[DONE]"
    assert [chunk for chunk in chunks if "usage" in chunk] == []
    assert json.loads(chunks[-1])["choices"][0]["finish_reason"] in ("stop", "length")


def test_the_index_of_a_choice_is_prompt_times_n_plus_sample() -> None:
    prompts = ["one", "two", "three"]
    body = {"prompt": prompts, "n": 2, "echo": True, "max_tokens": 1}
    choices = ask(("POST", "/v1/completions", body)).json()["choices"]
    assert [choice["index"] for choice in choices] == list(range(6))
    for choice in choices:
        assert choice["text"].startswith(prompts[choice["index"] // 2])

"""The contract line by line: endpoints, fields, errors and streams, as clients rely on them."""

import json
from typing import Any

import httpx2
import pytest

from phase0_request.request import FinishReason
from phase6_integration import connect
from phase6_integration.api.settings import ServerSettings
from phase6_integration.connect import create_app
from phase6_integration.process.health import Health
from tests.phase6_integration.fake_engine import FakeEngine, events, says
from tests.phase6_integration.posting import error_of, send

KEY = "a-key-of-the-test"
HELLO = [{"role": "user", "content": "Hello"}]
Request = tuple[str, str, Any]


def complete(**fields: Any) -> Request:
    return "POST", "/v1/completions", {"prompt": "Hello", **fields}


def chat(**fields: Any) -> Request:
    return "POST", "/v1/chat/completions", {"messages": HELLO, "max_tokens": 4, **fields}


def get(path: str) -> Request:
    return "GET", path, None


def ask(request: Request, engine: FakeEngine | None = None, **settings: Any) -> httpx2.Response:
    headers = {"authorization": f"Bearer {KEY}", "x-request-id": "mine"}
    return send(*request, engine, connect.settings(**settings), headers)


# Endpoints.

ENDPOINTS: list[tuple[Request, str]] = [
    (complete(), "application/json"),
    (chat(), "application/json"),
    (("POST", "/v1/responses", {"input": "Hello", "max_output_tokens": 4}), "application/json"),
    (("POST", "/v1/embeddings", {"input": "Hello"}), "application/json"),
    (("POST", "/tokenize", {"prompt": "Hello"}), "application/json"),
    (("POST", "/detokenize", {"tokens": [5]}), "application/json"),
    (("POST", "/ping", None), "application/json"),
    *((get(path), "application/json") for path in ("/v1/models", "/v1/models/tiny_chat", "/health", "/ping", "/load")),
    *((get(path), "application/json") for path in ("/v1/load", "/stats", "/version", "/openapi.json")),
    (get("/metrics"), "text/plain"),
    (get("/"), "text/html"),
]


@pytest.mark.parametrize(("request_", "kind"), ENDPOINTS, ids=["".join(request[:2]) for request, _ in ENDPOINTS])
def test_every_endpoint_answers(request_: Request, kind: str) -> None:
    response = ask(request_)
    assert response.status_code == 200
    assert response.headers["content-type"].split(";")[0] == kind
    assert response.headers["x-request-id"] == "mine"


def test_the_model_list_names_every_name() -> None:
    names = ("one", "org/two")
    listed = ask(get("/v1/models"), served_model_names=names).json()["data"]
    assert [(model["id"], model["root"], model["max_model_len"]) for model in listed] == [
        (n, "one", 2048) for n in names
    ]
    assert ask(get("/v1/models/org/two"), served_model_names=names).json()["id"] == "org/two"


# Fields: `test_request_fields` has all of them.


def test_the_schema_asks_for_a_key_where_one_is_asked_for() -> None:
    settings = connect.settings(api_keys=(KEY,))
    document = create_app(FakeEngine(), settings).openapi()
    routes = [(path, method) for path, methods in document["paths"].items() for method in methods]
    keyed = [route for route in routes if "security" in document["paths"][route[0]][route[1]]]
    refused = [route for route in routes if send(route[1], route[0], settings=settings).status_code == 401]
    assert keyed == refused != []
    assert "securitySchemes" not in create_app(FakeEngine(), ServerSettings()).openapi()["components"]


# Errors.


def failing(reason: FinishReason) -> FakeEngine:
    return FakeEngine(lambda _: [reason])


def in_state(health: Health) -> FakeEngine:
    engine = FakeEngine()
    engine.health, engine.reason = health, "OSError: no client may see /secret/place at 0x7f00"
    return engine


def full() -> FakeEngine:
    engine = FakeEngine(max_num_queued_reqs=1)
    engine._waiting.add("a waiting request")
    return engine


BAD = "invalid_request_error"
REFUSED: list[tuple[Request, int, str]] = [  # with the status and the code
    (complete(n=0), 400, "invalid_value"),
    (("POST", "/v1/completions", {}), 400, "missing_field"),
    (complete(x=0), 400, "unknown_field"),
    (chat(functions=[5]), 400, "unsupported_field"),
    (complete(prompt=[5] * 2100), 400, "context_length_exceeded"),
    (complete(prompt=""), 400, "invalid_value"),
    (complete(model="b"), 404, "model_not_found"),
    (get("/v2/models"), 404, "not_found"),
    (("POST", "/v1/rerank", {"query": "a"}), 404, "not_found"),
    (get("/v1/models/"), 404, "model_not_found"),
    (get("/v1/completions"), 405, "method_not_allowed"),
    (complete(prompt="a" * 9000), 413, "body_too_large"),
]
FAILED: list[tuple[Any, Request, int, str, str]] = [  # of such an engine, with the status, the type and the code
    (lambda: failing(FinishReason.TIMEOUT), complete(), 408, "timeout_error", "deadline_passed"),
    (full, complete(), 429, "rate_limit_error", "queue_full"),
    (lambda: failing(FinishReason.ERROR), complete(), 500, "server_error", "internal_error"),
    *(
        (lambda health=health: in_state(health), request, 503, "service_unavailable_error", health.value)
        for request in (complete(), get("/health"))
        for health in Health
        if health is not Health.READY
    ),
]
ERRORS = [(FakeEngine, request, status, BAD, code) for request, status, code in REFUSED] + FAILED
OWN_HEADERS = {"allow": (405,), "retry-after": (429, 503)}


@pytest.mark.parametrize(("make", "request_", "status", "kind", "code"), ERRORS, ids=[case[-1] for case in ERRORS])
def test_every_error_has_its_status_its_shape_and_its_headers(
    make: Any, request_: Request, status: int, kind: str, code: str
) -> None:
    response = ask(request_, make(), api_keys=(KEY,), max_body_bytes=9000)
    error = error_of(response)
    assert (response.status_code, error["type"], error["code"]) == (status, kind, code)
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-request-id"] == "mine"
    for name, statuses in OWN_HEADERS.items():
        assert (name in response.headers) == (status in statuses)
    assert ("mine" in error["message"]) == (status == 500)
    assert "no client may see" not in response.text


def test_a_request_needs_a_key_and_a_body_its_kind() -> None:
    refused = send(*complete(), settings=connect.settings(api_keys=(KEY,)))
    error = error_of(refused)
    assert (refused.status_code, refused.headers["www-authenticate"]) == (401, "Bearer")
    assert (error["type"], error["code"]) == ("authentication_error", "invalid_api_key")
    refused = send(*complete(), headers={"content-type": "text/plain"})
    assert (refused.status_code, error_of(refused)["code"]) == (415, "unsupported_media_type")


def test_the_document_says_the_shape_of_every_error() -> None:
    document = create_app(FakeEngine(), ServerSettings()).openapi()
    for path, operation in (
        (path, one) for path, operations in document["paths"].items() for one in operations.values()
    ):
        assert operation["responses"].keys() == {"200", "4XX", "5XX"}
        shape = "OllamaError" if path.startswith("/api/") else "ErrorResponse"
        for status in ("4XX", "5XX"):
            content = operation["responses"][status]["content"]
            assert content == {"application/json": {"schema": {"$ref": f"#/components/schemas/{shape}"}}}
    schemas = document["components"]["schemas"]
    assert schemas["ErrorResponse"]["required"] == ["error"]
    assert schemas["Error"]["required"] == ["message", "type", "param", "code"]


# Streams: `api/test_streaming` has their order, with usage.


@pytest.mark.parametrize("asks", [complete, chat])
def test_a_stream_has_no_usage_unless_it_is_asked_for(asks: Any) -> None:
    *chunks, done = events(ask(asks(stream=True), FakeEngine(says("one two three"))).content)
    assert done == "[DONE]"
    assert [chunk for chunk in chunks if "usage" in chunk] == []
    assert json.loads(chunks[-1])["choices"][0]["finish_reason"] in ("stop", "length")


def test_the_index_of_a_choice_is_prompt_times_n_plus_sample() -> None:
    prompts = ["one", "two", "three"]
    choices = ask(complete(prompt=prompts, n=2, echo=True, max_tokens=1)).json()["choices"]
    assert [choice["index"] for choice in choices] == list(range(6))
    for choice in choices:
        assert choice["text"].startswith(prompts[choice["index"] // 2])

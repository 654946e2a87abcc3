"""The middleware around an application: request ids, API keys, headers and bodies."""

import logging
import re
from typing import Any

import pytest

from phase6_integration import connect
from phase6_integration.extras.edge import middleware
from tests.phase6_integration.middleware_app import JSON, KEYS, App, access_lines, call

# Names.


@pytest.mark.parametrize("names", [[b"a"], [b"req-1/x~!"], [b"x" * 128]])
def test_a_sane_request_id_is_kept(names: list[bytes]) -> None:
    app = App()
    response = call(app, headers=[(b"x-request-id", name) for name in names])
    assert response.headers["x-request-id"] == names[0].decode() == app.seen[0]["state"]["request_id"]


@pytest.mark.parametrize("names", [[], [b""], [b"x" * 129], [b"a b"], [b"a\nb"], [b"\xff"], [b"a\x7f"], [b"a", b"b"]])
def test_any_other_is_replaced_by_a_new_one(names: list[bytes]) -> None:
    headers = [(b"x-request-id", name) for name in names]
    first, second = (call(App(), headers=headers).headers["x-request-id"] for _ in range(2))
    assert re.fullmatch("[0-9a-f]{32}", first)
    assert first != second


# Keys.

CLOSED = ["/v1/completions", "/v1/models", "/metrics", "/load", "/stats", "/openapi.json", "/nothing", "/health/other"]


@pytest.mark.parametrize("path", [*CLOSED, "//health", "/HEALTH"])
def test_without_a_key_all_but_a_few_routes_are_closed(path: str) -> None:
    app = App()
    response = call(app, path, api_keys=KEYS)
    assert (response.status, response.headers["www-authenticate"]) == (401, "Bearer")
    assert response.error["code"] == "invalid_api_key"
    assert "x-request-id" in response.headers
    assert app.seen == []


@pytest.mark.parametrize("path", ["/", "/health", "/ping", "/version"])
def test_the_public_routes_need_no_key(path: str) -> None:
    assert call(App(), path, api_keys=KEYS).status == 200


VALID = [b"Bearer one", b"Bearer two", b"bearer two", b"BEARER  one"]
INVALID = [b"Bearer three", b"Bearer", b"Bearer ", b"one", b"Basic one", b"Bearer one two", b"Bearer on", b"\xff\xfe"]


@pytest.mark.parametrize(
    ("values", "status"),
    [*(([value], 200) for value in VALID), *(([value], 401) for value in INVALID), ([b"Bearer one"] * 2, 401)],
)
def test_any_of_the_keys_opens_and_nothing_else(values: list[bytes], status: int) -> None:
    assert call(App(), headers=[(b"authorization", value) for value in values], api_keys=KEYS).status == status


def test_every_key_is_compared_in_constant_time_whichever_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[int] = []

    def compare(given: bytes, known: bytes) -> bool:
        compared.append(len(given))
        return given == known

    monkeypatch.setattr("hmac.compare_digest", compare)
    assert call(App(), headers=[(b"authorization", b"Bearer one")], api_keys=KEYS).status == 200
    assert call(App(), headers=[(b"authorization", b"Bearer x")], api_keys=KEYS).status == 401
    assert compared == [32] * 4


def test_a_key_shows_nowhere(caplog: pytest.LogCaptureFixture) -> None:
    ours, wrong = "sk-of-the-server", "sk-of-a-stranger"
    settings = connect.settings(api_keys=(ours,))
    with caplog.at_level(logging.DEBUG):
        refused = call(App(), headers=[(b"authorization", b"Bearer " + wrong.encode())], api_keys=(ours,))
        call(App(), headers=[(b"authorization", b"Bearer " + ours.encode())], api_keys=(ours,))
    shown = repr(settings) + refused.body.decode() + caplog.text + str([vars(record) for record in caplog.records])
    assert ours not in shown
    assert wrong not in shown
    with pytest.raises(ValueError, match="printable ASCII") as error:
        connect.settings(api_keys=("sk secret",))
    assert "secret" not in str(error.value)


# Headers and bodies.


def test_headers_are_counted_and_weighed() -> None:
    many, heavy = [(b"x-%d" % i, b"") for i in range(4)], [(b"name", b"value")]
    assert call(App(), headers=many, max_headers=5).status == 200
    assert call(App(), headers=many, max_headers=4).status == 431
    assert call(App(), headers=heavy, max_header_bytes=14).status == 200
    response = call(App(), headers=heavy, max_header_bytes=13)
    assert (response.status, response.error["code"]) == (431, "headers_too_large")
    assert response.headers["connection"] == "close"


def test_head_is_get_to_the_routes_and_head_to_the_log(caplog: pytest.LogCaptureFixture) -> None:
    app = App()
    with caplog.at_level(logging.INFO):
        assert call(app, "/version", method="HEAD").status == 200
    assert app.seen[0]["method"] == "GET"
    assert access_lines(caplog)[0]["method"] == "HEAD"


def with_length(length: int | bytes) -> list[tuple[bytes, bytes]]:
    return [JSON, (b"content-length", length if isinstance(length, bytes) else b"%d" % length)]


CHUNKED = [JSON, (b"transfer-encoding", b"chunked")]
PROBLEM = "application/problem+json"


def test_a_body_arrives_in_one_piece() -> None:
    body = b'{"a": 1}'
    response = call(App(), headers=with_length(8), pieces=[body[:3], b"", body[3:]], max_body_bytes=8)
    assert (response.status, response.body) == (200, body)
    assert call(App(), headers=CHUNKED, pieces=[b"12345", b"67890"], max_body_bytes=10).status == 200
    for headers in ([], [(b"content-length", b"0")]):
        assert call(App(), headers=headers, pieces=[b""]).status == 200, "no body needs no content type"


class Deaf(App):
    """Answers at once, whatever comes."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.seen.append(scope)
        await send({"type": "http.response.start", "status": 405, "headers": []})
        await send({"type": "http.response.body", "body": b""})


@pytest.mark.parametrize("path", [*sorted(middleware.PUBLIC), "/static/main.js"])
@pytest.mark.parametrize("framing", [(b"content-length", b"4000000"), (b"transfer-encoding", b"chunked")])
def test_a_route_that_needs_no_key_reads_no_body(path: str, framing: tuple[bytes, bytes]) -> None:
    """Bodies that held back their last byte took the memory for those of clients with keys."""
    sent: dict[str, Any] = {"headers": [JSON, framing], "pieces": [b"x" * 9999], "arrives": False}
    assert call(app := Deaf(), path, api_keys=KEYS, receive_timeout=0.01, **sent).status == 405
    assert len(app.seen) == 1


def assert_refused(status: int, code: str, **sent: Any) -> None:
    app = App()
    response = call(app, **sent)
    assert (response.status, response.error["code"], app.seen) == (status, code, [])
    if status == 408:
        assert response.headers["connection"] == "close"
    if code == "unsupported_content_encoding":
        assert response.headers["accept-encoding"] == "identity"
        assert "hunter2" not in response.error["message"]


@pytest.mark.parametrize("length", [b"11", b"-1", b"1e3", b"+5", b"9" * 400, "\u00b2".encode()])
def test_a_body_with_a_length_that_is_large_or_none_is_not_read(length: bytes) -> None:
    assert_refused(413, "body_too_large", headers=with_length(length), pieces=[], max_body_bytes=10)


def test_a_body_that_turns_out_too_large_is_refused_while_it_comes() -> None:
    parts = [b"12345", b"678901"]
    assert_refused(413, "body_too_large", headers=CHUNKED, pieces=parts, arrives=False, max_body_bytes=10)


def test_a_body_that_does_not_arrive_is_given_up() -> None:
    assert_refused(408, "body_timeout", headers=with_length(100), pieces=[b"{"], arrives=False, receive_timeout=0.01)


def test_a_client_that_disconnects_while_sending_reaches_no_route() -> None:
    app = App()
    assert call(app, headers=with_length(4), pieces=[b"12"], arrives=False, leaves=True).status == 0
    assert app.seen == []


@pytest.mark.parametrize("kind", ["application/json", "application/json; charset=utf-8", "APPLICATION/JSON", PROBLEM])
def test_json_by_its_names_is_let_in(kind: str) -> None:
    headers = [(b"content-type", kind.encode()), (b"content-length", b"2")]
    assert call(App(), headers=headers, pieces=[b"{}"]).status == 200


@pytest.mark.parametrize("kind", [b"text/plain", b"application/x-www-form-urlencoded", b"", b"json", b"text/json+x"])
def test_what_is_not_json_is_415(kind: bytes) -> None:
    """A page of another site can send a form without a preflight, but no JSON."""
    headers = [(b"content-type", kind), (b"content-length", b"2")]
    assert_refused(415, "unsupported_media_type", headers=headers, pieces=[b"{}"])


@pytest.mark.parametrize("coding", [b"gzip", b"GZIP", b"br", b"gzip, br", b"hunter2"])
def test_an_encoded_body_is_not_read(coding: bytes) -> None:
    headers = [(b"content-encoding", coding), *with_length(2)]
    assert_refused(415, "unsupported_content_encoding", headers=headers, pieces=[b"{}"])
    identity = [(b"content-encoding", b"Identity"), *with_length(2)]
    assert call(App(), headers=identity, pieces=[b"{}"]).status == 200

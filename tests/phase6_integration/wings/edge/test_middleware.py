"""The middleware around an application: request ids, API keys, headers and bodies."""

import logging
import re

import pytest

from phase6_integration.api.settings import ServerSettings
from tests.phase6_integration.middleware_app import JSON, KEYS, App, access_lines, call

# Names.


@pytest.mark.parametrize("name", [b"a", b"req-1/x~!", b"x" * 128])
def test_a_sane_request_id_is_kept(name: bytes) -> None:
    app = App()
    response = call(app, headers=[(b"x-request-id", name)])
    assert response.headers["x-request-id"] == name.decode() == app.seen[0]["state"]["request_id"]


@pytest.mark.parametrize("name", [b"", b"x" * 129, b"a b", b"a\nb", b"\xff", b"a\x7f"])
def test_one_that_is_not_is_replaced(name: bytes) -> None:
    response = call(App(), headers=[(b"x-request-id", name)])
    assert re.fullmatch("[0-9a-f]{32}", response.headers["x-request-id"])


def test_two_names_are_none() -> None:
    response = call(App(), headers=[(b"x-request-id", b"a"), (b"x-request-id", b"b")])
    assert response.headers["x-request-id"] not in ("a", "b")


def test_names_differ() -> None:
    assert call(App()).headers["x-request-id"] != call(App()).headers["x-request-id"]


# Keys.


@pytest.mark.parametrize(
    "path",
    [
        "/v1/completions",
        "/v1/models",
        "/metrics",
        "/load",
        "/v1/embeddings",
        "/stats",
        "/openapi.json",
        "/nothing",
        "/health/",
        "//health",
        "/HEALTH",
    ],
)
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


@pytest.mark.parametrize("value", [b"Bearer one", b"Bearer two", b"bearer two", b"BEARER  one"])
def test_any_of_the_keys_opens(value: bytes) -> None:
    assert call(App(), headers=[(b"authorization", value)], api_keys=KEYS).status == 200


@pytest.mark.parametrize(
    "value",
    [
        b"Bearer three",
        b"Bearer",
        b"Bearer ",
        b"one",
        b"Basic one",
        b"Bearer one two",
        b"Bearer on",
        b"Bearer onetwo",
        b"\xff\xfe",
    ],
)
def test_nothing_else_does(value: bytes) -> None:
    assert call(App(), headers=[(b"authorization", value)], api_keys=KEYS).status == 401


def test_two_authorizations_are_none() -> None:
    headers = [(b"authorization", b"Bearer one"), (b"authorization", b"Bearer one")]
    assert call(App(), headers=headers, api_keys=KEYS).status == 401


def test_every_key_is_compared_whichever_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[int] = []

    def compare(one: bytes, other: bytes) -> bool:
        compared.append(len(one))
        return one == other

    monkeypatch.setattr("hmac.compare_digest", compare)
    assert call(App(), headers=[(b"authorization", b"Bearer one")], api_keys=KEYS).status == 200
    assert call(App(), headers=[(b"authorization", b"Bearer x")], api_keys=KEYS).status == 401
    assert compared == [32] * 4


def test_a_key_shows_nowhere(caplog: pytest.LogCaptureFixture) -> None:
    ours, wrong = "sk-of-the-server", "sk-of-a-stranger"
    settings = ServerSettings(api_keys=(ours,))
    with caplog.at_level(logging.DEBUG):
        refused = call(App(), headers=[(b"authorization", b"Bearer " + wrong.encode())], api_keys=settings.api_keys)
        call(App(), headers=[(b"authorization", b"Bearer " + ours.encode())], api_keys=settings.api_keys)
    told = repr(settings) + refused.body.decode() + caplog.text + str([vars(record) for record in caplog.records])
    assert ours not in told
    assert wrong not in told
    with pytest.raises(ValueError, match="printable ASCII") as error:
        ServerSettings(api_keys=("sk secret",))
    assert "secret" not in str(error.value)


# Headers and bodies.


def test_headers_are_counted_and_weighed() -> None:
    many = [(b"x-%d" % i, b"") for i in range(4)]
    assert call(App(), headers=many, max_headers=5).status == 200
    assert call(App(), headers=many, max_headers=4).status == 431
    heavy = [(b"name", b"value")]
    assert call(App(), headers=heavy, max_header_bytes=14).status == 200
    response = call(App(), headers=heavy, max_header_bytes=13)
    assert (response.status, response.error["code"]) == (431, "headers_too_large")
    assert response.headers["connection"] == "close"


@pytest.mark.parametrize(
    ("version", "hosts", "status"),
    [("1.1", 0, 400), ("1.1", 1, 200), ("1.1", 2, 400), ("1.0", 0, 200), ("1.0", 2, 400)],
)
def test_a_request_names_its_host_once(version: str, hosts: int, status: int) -> None:
    app = App()
    response = call(app, version=version, hosts=[b"x"] * hosts)
    assert response.status == status
    assert len(app.seen) == (status == 200)
    if status == 400:
        assert (response.error["code"], response.headers["connection"]) == ("bad_http", "close")
        assert str(hosts) in response.error["message"]


def test_head_is_get_to_the_routes_and_head_to_the_log(caplog: pytest.LogCaptureFixture) -> None:
    app = App()
    with caplog.at_level(logging.INFO):
        assert call(app, "/version", method="HEAD").status == 200
    assert app.seen[0]["method"] == "GET"
    assert access_lines(caplog)[0]["method"] == "HEAD"


def with_length(body: bytes) -> list[tuple[bytes, bytes]]:
    return [JSON, (b"content-length", b"%d" % len(body))]


def test_a_body_arrives_in_one_piece() -> None:
    body = b'{"a": 1}'
    response = call(App(), headers=with_length(body), pieces=[body[:3], b"", body[3:]], max_body_bytes=len(body))
    assert (response.status, response.body) == (200, body)


def test_a_body_with_a_large_content_length_is_not_read() -> None:
    app = App()
    response = call(app, headers=[JSON, (b"content-length", b"11")], pieces=[], max_body_bytes=10)
    assert (response.status, response.error["code"]) == (413, "body_too_large")
    assert app.seen == []


@pytest.mark.parametrize("length", [b"-1", b"1e3", b"+5", b"9" * 400, "²".encode()])
def test_a_length_that_is_none_is_refused(length: bytes) -> None:
    assert call(App(), headers=[JSON, (b"content-length", length)], pieces=[b"{}"]).status == 413


def test_a_body_that_turns_out_too_large_is_refused_while_it_comes() -> None:
    headers = [JSON, (b"transfer-encoding", b"chunked")]
    assert call(App(), headers=headers, pieces=[b"12345", b"67890"], max_body_bytes=10).status == 200
    endless = call(App(), headers=headers, pieces=[b"12345", b"678901"], arrives=False, max_body_bytes=10)
    assert endless.status == 413


def test_a_body_that_does_not_arrive_is_given_up() -> None:
    headers = [JSON, (b"content-length", b"100")]
    response = call(App(), headers=headers, pieces=[b"{"], arrives=False, receive_timeout=0.01)
    assert (response.status, response.error["code"], response.headers["connection"]) == (408, "body_timeout", "close")


def test_a_client_that_disconnects_while_sending_reaches_no_route() -> None:
    app = App()
    assert call(app, headers=with_length(b"1234"), pieces=[b"12"], arrives=False, leaves=True).status == 0
    assert app.seen == []


@pytest.mark.parametrize(
    "kind", [b"application/json", b"application/json; charset=utf-8", b"APPLICATION/JSON", b"application/problem+json"]
)
def test_json_by_its_names_is_let_in(kind: bytes) -> None:
    headers = [(b"content-type", kind), (b"content-length", b"2")]
    assert call(App(), headers=headers, pieces=[b"{}"]).status == 200


@pytest.mark.parametrize(
    "kind", [b"text/plain", b"application/x-www-form-urlencoded", b"", b"json", b"text/json+x", b"application/jsonp"]
)
def test_what_is_not_json_is_415(kind: bytes) -> None:
    app = App()
    response = call(app, headers=[(b"content-type", kind), (b"content-length", b"2")], pieces=[b"{}"])
    assert (response.status, response.error["code"], app.seen) == (415, "unsupported_media_type", [])


@pytest.mark.parametrize("coding", [b"gzip", b"GZIP", b"br", b"gzip, br", b"hunter2"])
def test_an_encoded_body_is_not_read(coding: bytes) -> None:
    app = App()
    response = call(app, headers=[(b"content-encoding", coding), *with_length(b"{}")], pieces=[b"{}"])
    assert (response.status, response.error["code"], app.seen) == (415, "unsupported_content_encoding", [])
    assert response.headers["accept-encoding"] == "identity"
    assert "hunter2" not in response.error["message"]


def test_a_body_with_the_identity_encoding_is_read() -> None:
    headers = [(b"content-encoding", b"Identity"), *with_length(b"{}")]
    assert call(App(), headers=headers, pieces=[b"{}"]).status == 200


def test_a_request_without_a_body_needs_no_content_type() -> None:
    assert call(App(), "/health", method="GET").status == 200
    assert call(App(), headers=[(b"content-length", b"0")], pieces=[b""]).status == 200

"""The middleware around an application that records what reaches it."""

import asyncio
import json
import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from phase6_integration.server.logs import HumanFormatter, JsonFormatter
from phase6_integration.server.middleware import middleware
from phase6_integration.server.settings import ServerSettings

JSON = (b"content-type", b"application/json")


@dataclass
class Response:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def error(self) -> dict[str, Any]:
        return json.loads(self.body)["error"]


class App:
    """Echoes the body, or does what the path says."""

    def __init__(self, does: Any = None) -> None:
        self.does = does
        self.seen: list[dict[str, Any]] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        body = b""
        self.seen.append(scope)
        if any(name == b"content-length" or name == b"transfer-encoding" for name, _ in scope["headers"]):
            message = await receive()
            assert message["more_body"] is False
            body = message["body"]
        if self.does is not None:
            await self.does(scope, receive, send)
            return
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": body})


def call(
    app: App,
    path: str = "/v1/completions",
    *,
    method: str = "POST",
    version: str = "1.1",
    hosts: Sequence[bytes] = (b"x",),
    headers: Sequence[tuple[bytes, bytes]] = (),
    pieces: Sequence[bytes] | None = None,
    arrives: bool = True,
    leaves: bool = False,
    **settings: Any,
) -> Response:
    """One request through the middleware. `pieces` is its body as it arrives; without `arrives` its end never does."""
    scope = {
        "type": "http",
        "http_version": version,
        "method": method,
        "path": path,
        "raw_path": path.encode(),
        "headers": [*((b"host", host) for host in hosts), *headers],
    }
    coming = [
        {"type": "http.request", "body": piece, "more_body": not arrives or i + 1 < len(pieces)}
        for i, piece in enumerate(pieces or ())
    ]
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        if coming:
            return coming.pop(0)
        if not leaves:
            await asyncio.Event().wait()
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    stack: Any = app
    for one in reversed(middleware(ServerSettings(**settings))):
        stack = one.cls(stack, *one.args, **one.kwargs)
    asyncio.run(stack(scope, receive, send))
    if not sent:
        return Response(0, {}, b"")
    names = [name for name, _ in sent[0]["headers"]]
    assert len(names) == len(set(names))
    received = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
    return Response(sent[0]["status"], received, b"".join(m.get("body", b"") for m in sent[1:]))


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

KEYS = ("one", "two")


@pytest.mark.parametrize(
    "path",
    [
        "/v1/completions",
        "/v1/models",
        "/metrics",
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


@pytest.mark.parametrize("path", ["/", "/health", "/version"])
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
    if coding == b"gzip":
        assert "gzip" in response.error["message"]


def test_a_body_with_the_identity_encoding_is_read() -> None:
    headers = [(b"content-encoding", b"Identity"), *with_length(b"{}")]
    assert call(App(), headers=headers, pieces=[b"{}"]).status == 200


def test_a_request_without_a_body_needs_no_content_type() -> None:
    assert call(App(), "/health", method="GET").status == 200
    assert call(App(), headers=[(b"content-length", b"0")], pieces=[b""]).status == 200


# Faults and lines of the log.


def test_a_fault_of_ours_tells_its_id_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    async def fails(*_: Any) -> None:
        raise RuntimeError("at 0x7f00 in /secret/place.py")

    with caplog.at_level(logging.INFO):
        response = call(App(fails), headers=[(b"x-request-id", b"it")])
    assert response.status == 500
    assert "it" in response.error["message"]
    assert not re.search("secret|0x|Runtime|place", response.body.decode())
    assert response.headers["x-request-id"] == "it"
    assert "/secret/place.py" in caplog.text
    assert [line["status"] for line in access_lines(caplog)] == [500]


def test_a_fault_in_the_middle_of_an_answer_leaves_it_incomplete(caplog: pytest.LogCaptureFixture) -> None:
    """It cannot be told any more: the server cuts the connection when a response is left open."""
    sent = []

    async def fails(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"half", "more_body": True})
        sent.append("half")
        raise RuntimeError("mid-stream")

    with caplog.at_level(logging.INFO):
        response = call(App(fails))
    assert (response.status, response.body, sent) == (200, b"half", ["half"])
    assert "mid-stream" in caplog.text
    assert access_lines(caplog)[0]["status"] == 499


@pytest.mark.parametrize("started", [False, True])
def test_a_request_that_outlasts_the_server_is_one_line(caplog: pytest.LogCaptureFixture, started: bool) -> None:
    async def is_cancelled(scope: Any, receive: Any, send: Any) -> None:
        if started:
            await send({"type": "http.response.start", "status": 200, "headers": []})
        raise asyncio.CancelledError

    with caplog.at_level(logging.INFO):
        response = call(App(is_cancelled))
    assert response.status == (200 if started else 503)
    (line,) = (record for record in caplog.records if record.name == "nanoserve")
    assert line.exc_info is None
    assert "end of the server" in line.message


@pytest.mark.parametrize("path", ["/health", "/metrics"])
def test_polled_routes_are_logged_only_when_they_fail(caplog: pytest.LogCaptureFixture, path: str) -> None:
    with caplog.at_level(logging.DEBUG):
        call(App(), path, method="GET")
        call(App(), path, method="GET", max_headers=1, headers=[(b"a", b"b")])
    levels = [(r.levelname, vars(r)["fields"]["status"]) for r in caplog.records if r.name == "nanoserve.access"]
    assert levels == [("DEBUG", 200), ("INFO", 431)]


def access_lines(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    return [vars(record)["fields"] for record in caplog.records if record.name == "nanoserve.access"]


@dataclass
class Times:
    queue: float | None = None
    ttft: float | None = None


@dataclass
class Answer:
    cached_tokens: int
    generated: int
    times: Times


def test_one_line_a_request_with_its_tokens_and_times(caplog: pytest.LogCaptureFixture) -> None:
    async def serves(scope: Any, receive: Any, send: Any) -> None:
        account = scope["state"]["account"]
        account.prompt_tokens = 7
        account.outputs = [Answer(4, 3, Times(0.5, 0.75)), Answer(2, 5, Times(0.25, 1.0)), Answer(0, 0, Times())]
        account.finish_reasons += ["stop", "length", "stop"]
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})

    with caplog.at_level(logging.INFO):
        call(App(serves), "/v1/completions", headers=[(b"x-request-id", b"me")])
    (line,) = access_lines(caplog)
    assert line.pop("total") >= 0
    assert line == {
        "id": "me",
        "method": "POST",
        "path": "/v1/completions",
        "status": 200,
        "prompt_tokens": 7,
        "cached_tokens": 6,
        "generated_tokens": 8,
        "queue": 0.25,
        "ttft": 0.75,
        "finish_reason": "length,stop",
    }


def test_a_client_that_left_is_a_499_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    async def waits(scope: Any, receive: Any, send: Any) -> None:
        assert (await receive())["type"] == "http.disconnect"

    with caplog.at_level(logging.INFO):
        assert call(App(waits), leaves=True).status == 0
    assert access_lines(caplog)[0]["status"] == 499


def test_refusals_are_logged_too(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        call(App(), api_keys=KEYS)
        call(App(), headers=[JSON, (b"content-length", b"11")], pieces=[], max_body_bytes=10)
    assert [line["status"] for line in access_lines(caplog)] == [401, 413]


def test_a_path_begins_no_line_and_shows_no_query(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        call(App(), "/v1/%0AINFO%20forged" + "x" * 500)
    (record,) = (record for record in caplog.records if record.name == "nanoserve.access")
    line = HumanFormatter().format(record)
    assert "\n" not in line
    assert "/v1/%0AINFO%20forged" in line
    assert len(line) < 400


def record_of(message: str, **fields: Any) -> logging.LogRecord:
    record = logging.LogRecord("nanoserve", logging.INFO, "", 0, message, None, None)
    record.fields = fields
    return record


def test_a_line_for_machines_is_one_object() -> None:
    line = JsonFormatter().format(record_of("request", id="x\ny", status=200, total=0.25))
    assert "\n" not in line
    read = json.loads(line)
    assert (read["message"], read["id"], read["status"], read["total"]) == ("request", "x\ny", 200, 0.25)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}\+00:00", read["time"])


def test_a_line_for_people_is_one_line() -> None:
    line = HumanFormatter().format(record_of("request", id="x\ny", total=0.25, why="two words"))
    assert re.fullmatch(r"\d\d:\d\d:\d\d info    request id='x\\ny' total=0.250s why='two words'", line)

"""Class: requests that two parsers read differently, or that have no end.

Published cases: Content-Length beside Transfer-Encoding (CVE-2026-40561, Starlet), trailers taken for headers or for
the next request (CVE-2025-59822, http4s), headers without a limit (CVE-2025-48956, vLLM), a chunked body without a
limit (CVE-2025-46728, cpp-httplib, which llama.cpp's server uses).
Compressed bodies are refused, so that none can be a bomb: test_middleware.
"""

import asyncio
import contextlib
import logging
import time

import h11
import httpx2
import pytest
from uvicorn.protocols.http.h11_impl import H11Protocol

from phase6_integration import connect
from phase6_integration.api.settings import ServerSettings
from phase6_integration.app import create_app
from tests.phase6_integration.adversarial.raw import (
    PATIENCE,
    POST,
    error_in,
    exchange,
    heard,
    line,
    listening,
    request_of,
)
from tests.phase6_integration.asgi import Call, awaited
from tests.phase6_integration.fake_engine import FakeEngine, client

GET = b"GET /version HTTP/1.1\r\nhost: x\r\n"
LAST = GET + b"connection: close\r\n\r\n"
CHUNKED = b"transfer-encoding: chunked\r\n\r\n"
BOTH = b"content-length: 4\r\n" + CHUNKED + b"0\r\n\r\n"
PREFLIGHT = b"OPTIONS / HTTP/1.1\r\nhost: x\r\norigin: http://a\r\naccess-control-request-method: POST\r\n"

REFUSED: dict[str, tuple[str, bytes, int, str]] = {  # by what it is: the server, all that is sent, status and code
    "no HTTP": ("plain", b"HELLO\r\n\r\n", 400, "bad_http"),
    "a header without a colon": ("plain", b"GET /health HTTP/1.1\r\nbad header\r\n\r\n", 400, "bad_http"),
    "a target that is not ASCII": ("plain", b"GET /\xff HTTP/1.1\r\n\r\n", 400, "bad_http"),
    "no host": ("plain", b"GET /health HTTP/1.1\r\n\r\n", 400, "bad_http"),
    "two hosts": ("plain", b"GET /health HTTP/1.1\r\nhost: x\r\nhost: y\r\n\r\n", 400, "bad_http"),
    "two framings": ("plain", POST + BOTH, 400, "bad_http"),
    "two framings of a preflight": ("guarded", PREFLIGHT + BOTH + LAST, 400, "bad_http"),  # the rest is no request
    "a negative length": ("plain", POST + b"content-length: -2\r\n\r\n{}", 400, "bad_http"),
    "two lengths": ("plain", POST + b"content-length: 2\r\ncontent-length: 3\r\n\r\n{}", 400, "bad_http"),
    "a malformed chunk": ("plain", POST + CHUNKED + b"zz\r\n", 400, "bad_http"),
    "a key in the trailers": (
        "guarded",
        POST + b"connection: close\r\n" + CHUNKED + b"2\r\n{}\r\n0\r\nauthorization: Bearer k\r\n\r\n",
        401,
        "invalid_api_key",
    ),
    "a head that does not end": ("hurried", GET + b"x-slow: ", 408, "request_timeout"),
    "a body that does not arrive": ("hurried", POST + b"content-length: 100\r\n\r\n{", 408, "body_timeout"),
    "a long header": ("narrow", GET + b"x: " + b"a" * 5000, 431, "headers_too_large"),
    "headers without end": ("narrow", GET + b"a: b\r\n" * 1000, 431, "headers_too_large"),
    "many headers": ("narrow", GET + b"a: b\r\n" * 30 + b"\r\n", 431, "headers_too_large"),
}


@pytest.mark.parametrize(("server", "sent", "status", "code"), REFUSED.values(), ids=REFUSED)
def test_what_is_malformed_late_or_large_gets_one_error_and_the_connection_is_closed(
    request: pytest.FixtureRequest, server: str, sent: bytes, status: int, code: str
) -> None:
    found, error = error_in(exchange(request.getfixturevalue(server), sent))
    assert (found, error["code"]) == (status, code)


def test_a_head_that_comes_a_byte_at_a_time_gains_no_time(hurried: str) -> None:
    with line(hurried) as end:
        end.settimeout(0.01)
        end.sendall(b"GET /health HTTP/1.1\r\nx-slow: ")
        answer = b""
        for _ in range(int(PATIENCE / 0.01)):
            with contextlib.suppress(TimeoutError):
                end.sendall(b"a")
                answer = end.recv(65536)
                break
    assert error_in(answer)[0] == 408


def test_only_the_head_itself_is_counted_as_head(narrow: str) -> None:
    """Not the requests before it, which come in the same read as its first bytes."""
    before = request_of(b'{"prompt": "a", "max_tokens": 1%b}' % (b" " * 900)) * 10
    with line(narrow) as end:
        end.sendall(before + LAST[:10])
        answer = b""
        while answer.count(b"HTTP/1.1 200 OK") < 10:
            answer += end.recv(65536) or pytest.fail(f"closed after {answer!r}")
        end.sendall(LAST[10:])
        assert heard(end).count(b"HTTP/1.1 200 OK") == 1
    with line(narrow) as end:
        end.sendall(request_of(b'{"prompt": "a", "max_tokens": 1}') + GET + b"x: ")
        end.recv(65536)
        end.sendall(b"a" * 5000)
        assert error_in(heard(end))[0] == 431


def test_empty_lines_before_a_request_are_passed_over_and_keep_no_connection(hurried: str) -> None:
    """Some clients send one after a body."""
    with line(hurried) as end:
        end.sendall(b"\r\n" + GET + b"\r\n")
        assert b" 200 OK" in end.recv(65536)
        end.sendall(b"\r\n\r\n" + GET + b"\r\n")
        assert b" 200 OK" in end.recv(65536)
        end.sendall(b"\r\n")
        assert heard(end) == b""


@pytest.mark.parametrize("apart", [False, True])
def test_a_refused_body_that_goes_on_malformed_gets_one_answer(
    plain: str, apart: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with line(plain) as end:
        begun = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n" + CHUNKED + b"2\r\n{}\r\n"
        end.sendall(begun if apart else begun + b"zz\r\n")
        answer = b""
        if apart:
            answer = end.recv(65536)
            end.sendall(b"zz\r\n")
        answer += heard(end)
    assert error_in(answer)[0] == (415 if apart else 400)  # and nothing follows it
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


@pytest.mark.parametrize(
    ("fault", "status", "code"), [(MemoryError, 503, "overloaded"), (KeyError, 500, "internal_error")]
)
@pytest.mark.parametrize("where", [(h11.Connection, "next_event"), (H11Protocol, "data_received")])
def test_a_fault_of_the_server_while_it_reads_a_request_is_not_the_clients(
    plain: str,
    monkeypatch: pytest.MonkeyPatch,
    where: tuple[type, str],
    fault: type[Exception],
    status: int,
    code: str,
) -> None:
    """Under memory pressure valid requests were answered with 400 bad_http, which clients do not try again."""

    def fails(*_: object) -> None:
        raise fault("at 0x7f00 in /secret/place.py")

    with line(plain) as end:
        monkeypatch.setattr(*where, fails)
        end.sendall(request_of(b'{"prompt": "a", "max_tokens": 1}'))
        answer = heard(end)
    found, error = error_in(answer)
    assert (found, error["code"]) == (status, code)
    assert (b"\r\nretry-after: " in answer) == (status == 503)
    assert b"secret" not in answer
    monkeypatch.undo()
    assert httpx2.get(f"{plain}/health").status_code == 200


def test_the_request_id_of_a_body_is_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    """A client looks for it there: it is part of the answer's id. Whether the request is served or refused."""

    async def ask(name: str, tokens: int) -> None:
        body = {"prompt": "a", "request_id": name, "max_tokens": tokens}
        async with Call(create_app(FakeEngine(), ServerSettings()), "/v1/completions", body):
            pass

    with caplog.at_level(logging.INFO, "nanoserve.access"):
        asyncio.run(ask("served", 1))
        asyncio.run(ask("refused", 0))
    fields = [vars(record)["fields"] for record in caplog.records]
    assert [(line["status"], line["request_id"]) for line in fields] == [(200, "served"), (400, "refused")]


def test_a_body_without_end_is_refused_while_it_comes() -> None:
    """And the connection does not stay open for the rest of it."""
    chunk = b"ff\r\n" + b"a" * 255 + b"\r\n"
    with listening(FakeEngine, connect.settings(max_body_bytes=1000, receive_timeout=1)) as url:
        assert error_in(exchange(url, POST + CHUNKED + chunk, chunk * 3))[0] == 413


@pytest.mark.parametrize("tail", [b"a: b\r\n" * 100_000, b"a: " + b"b" * 600_000])
def test_trailers_without_end_are_refused_too(narrow: str, tail: bytes) -> None:
    """More than one read takes in. The connection may be reset before the answer is read: more lies there unread."""
    answer = b""
    with contextlib.suppress(ConnectionError):
        answer = exchange(narrow, POST + CHUNKED + b"2\r\n{}\r\n0\r\n" + tail)
    assert not answer or error_in(answer)[0] == 431


BODY = b'{"prompt": "a", "max_tokens": 1}'
FRAMED = (
    b"content-length: %d\r\n\r\n%b" % (len(BODY), BODY),
    CHUNKED + b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY),
)


@pytest.mark.parametrize("framed", FRAMED)
@pytest.mark.parametrize("size", [1, 7, 10_000])
def test_an_offer_of_another_protocol_is_passed_over_and_its_body_read(plain: str, framed: bytes, size: int) -> None:
    """Clients of Java offer h2c with every request."""
    offer = POST + b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABk\r\n" + framed
    sent = offer + offer + GET + b"connection: Upgrade, close\r\nupgrade: websocket\r\n\r\n"
    answer = exchange(plain, *(sent[start : start + size] for start in range(0, len(sent), size)))
    assert answer.count(b"HTTP/1.1 200 OK") == 3
    assert answer.count(b'"completion_tokens":1') == 2


def test_any_number_of_offers_may_come_together(plain: str) -> None:
    many = (GET + b"connection: upgrade\r\nupgrade: h2c\r\n\r\n") * 1500
    assert exchange(plain, many + LAST).count(b"HTTP/1.1 200 OK") == 1501


@pytest.mark.parametrize(
    ("target", "status"),
    [
        (b"http://x/version", 200),
        (b"HTTPS://x:1/version?a=b", 200),
        (b"http://x", 200),
        (b"http://x/http://x/version", 404),
        (b"/../../etc/passwd", 404),
        (b"/%2e%2e/%2e%2e/etc/passwd", 404),
        (b"/playground.html", 404),
        (b"//etc/passwd", 404),
        (b"/v1/models/..%2f..%2fetc%2fpasswd", 404),
    ],
)
def test_a_target_may_name_the_server_and_no_path_leads_to_a_file(plain: str, target: bytes, status: int) -> None:
    answer = exchange(plain, b"GET %b HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n" % target)
    assert answer.startswith(b"HTTP/1.1 %d " % status)
    assert status == 200 or error_in(answer)


@awaited
async def test_a_path_of_slashes_costs_no_more_than_another() -> None:
    """Fault: one of 32 KiB held all clients up for 20 s, even without a key: the hint of a 404 was quadratic in it."""
    seconds = []
    async with client(FakeEngine(), connect.settings(api_keys=("k",))) as http:
        for length in (0, 100, 12_000):  # the first makes the list of paths
            before = time.process_time()
            assert (await http.get(f"/static/{'/' * length}x")).status_code == 404
            seconds.append(time.process_time() - before)
    assert seconds[2] < 20 * seconds[1]

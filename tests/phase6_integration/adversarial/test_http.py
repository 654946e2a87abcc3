"""Class: requests that two parsers read differently, or that have no end.

Published cases: Content-Length beside Transfer-Encoding (CVE-2026-40561, Starlet), trailers taken for headers or for
the next request (CVE-2025-59822, http4s), headers without a limit (CVE-2025-48956, vLLM), a chunked body without a
limit (CVE-2025-46728, cpp-httplib, which llama.cpp's server uses).
Compressed bodies are refused, so that none can be a bomb: test_middleware.
"""

import asyncio
import contextlib
import logging

import h11
import httpx
import pytest
from uvicorn.protocols.http.h11_impl import H11Protocol

from phase6_integration.api.settings import ServerSettings
from phase6_integration.app import create_app
from tests.phase6_integration.adversarial.raw import PATIENCE, POST, error_in, heard, line, listening, request_of
from tests.phase6_integration.asgi import Call
from tests.phase6_integration.fake_engine import FakeEngine


def test_a_head_that_does_not_end_is_given_up(hurried: str) -> None:
    with line(hurried) as one:
        one.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\nx-slow: ")
        status, error = error_in(heard(one))
    assert (status, error["code"]) == (408, "request_timeout")


def test_a_head_that_comes_a_byte_at_a_time_gains_no_time(hurried: str) -> None:
    with line(hurried) as one:
        one.settimeout(0.01)
        one.sendall(b"GET /health HTTP/1.1\r\nx-slow: ")
        answer = b""
        for _ in range(int(PATIENCE / 0.01)):
            try:
                one.sendall(b"a")
                answer = one.recv(65536)
            except TimeoutError:
                continue
            break
    assert error_in(answer)[0] == 408


@pytest.mark.parametrize("tail", [b"a" * 5000, b"a: b\r\n" * 1000])
def test_a_head_that_grows_without_end_is_refused_before_it_ends(narrow: str, tail: bytes) -> None:
    with line(narrow) as one:
        one.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\nx: " + tail)
        assert error_in(heard(one))[0] == 431


def test_a_request_before_a_head_is_not_counted_as_head(narrow: str) -> None:
    """It comes in the same piece as the first bytes of the next one."""
    first = request_of(b'{"prompt": "a", "max_tokens": 1%b}' % (b" " * 900)) * 10
    last = b"GET /version HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
    with line(narrow) as one:
        one.sendall(first + last[:10])
        told = b""
        while told.count(b"HTTP/1.1 200 OK") < 10:
            told += one.recv(65536) or pytest.fail(f"closed after {told!r}")
        one.sendall(last[10:])
        assert heard(one).count(b"HTTP/1.1 200 OK") == 1


def test_a_head_behind_another_request_is_counted_too(narrow: str) -> None:
    with line(narrow) as one:
        one.sendall(request_of(b'{"prompt": "a", "max_tokens": 1}') + b"GET /version HTTP/1.1\r\nhost: x\r\nx: ")
        one.recv(65536)
        one.sendall(b"a" * 5000)
        assert error_in(heard(one))[0] == 431


def test_line_ends_after_a_request_do_not_keep_the_line() -> None:
    with listening(FakeEngine, ServerSettings(receive_timeout=1.0)) as url, line(url) as one:
        one.sendall(b"GET /version HTTP/1.1\r\nhost: x\r\n\r\n")
        assert b" 200 OK" in one.recv(65536)
        one.sendall(b"\r\n")
        heard(one)


def test_empty_lines_before_a_request_are_passed_over(plain: str) -> None:
    """Some clients send one after a body."""
    with line(plain) as one:
        one.sendall(b"\r\nGET /version HTTP/1.1\r\nhost: x\r\n\r\n")
        assert b" 200 OK" in one.recv(65536)
        one.sendall(b"\r\n\r\n")
        one.sendall(b"GET /version HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        assert heard(one).count(b"HTTP/1.1 200 OK") == 1


@pytest.mark.parametrize("apart", [False, True])
def test_a_refused_body_that_goes_on_malformed_gets_one_answer(
    plain: str, apart: bool, caplog: pytest.LogCaptureFixture
) -> None:
    body = b"host: x\r\ntransfer-encoding: chunked\r\n\r\n2\r\n{}\r\n"
    with line(plain) as one:
        one.sendall(b"POST /v1/completions HTTP/1.1\r\n" + body + (b"" if apart else b"zz\r\n"))
        answer = b""
        if apart:
            answer = one.recv(65536)
            one.sendall(b"zz\r\n")
        answer += heard(one)
    assert error_in(answer)[0] == (415 if apart else 400)  # and nothing follows it
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


def test_a_preflight_with_two_framings_is_refused_too() -> None:
    asked = b"OPTIONS / HTTP/1.1\r\nhost: x\r\norigin: http://a\r\naccess-control-request-method: POST\r\n"
    framed = b"content-length: 4\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n"
    with listening(FakeEngine, ServerSettings(allowed_origins=("*",))) as url, line(url) as one:
        one.sendall(asked + framed + b"GET /version HTTP/1.1\r\nhost: x\r\n\r\n")
        assert error_in(heard(one))[0] == 400  # and what may be its body is no request


def test_too_many_headers_are_refused() -> None:
    with listening(FakeEngine, ServerSettings(max_headers=20)) as url, line(url) as one:
        one.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n" + b"a: b\r\n" * 30 + b"\r\n")
        assert error_in(heard(one))[0] == 431


@pytest.mark.parametrize(
    "said",
    [
        b"HELLO\r\n\r\n",
        b"GET /health HTTP/1.1\r\nbad header\r\n\r\n",
        b"GET /\xff HTTP/1.1\r\n\r\n",
        b"GET /health HTTP/1.1\r\n\r\n",
        b"GET /health HTTP/1.1\r\nhost: x\r\nhost: y\r\n\r\n",
        POST + b"content-length: 2\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        POST + b"content-length: -2\r\n\r\n{}",
        POST + b"content-length: 2\r\ncontent-length: 3\r\n\r\n{}",
        POST + b"transfer-encoding: chunked\r\n\r\nzz\r\n",
    ],
)
def test_what_is_not_http_is_a_400_in_the_shape_of_all_errors(plain: str, said: bytes) -> None:
    with line(plain) as one:
        one.sendall(said)
        assert error_in(heard(one))[0] == 400


@pytest.mark.parametrize(
    ("fault", "status", "code"), [(MemoryError, 503, "overloaded"), (KeyError, 500, "internal_error")]
)
@pytest.mark.parametrize(
    "where", [(h11.Connection, "receive_data"), (h11.Connection, "next_event"), (H11Protocol, "data_received")]
)
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

    with line(plain) as one:
        monkeypatch.setattr(*where, fails)
        one.sendall(request_of(b'{"prompt": "a", "max_tokens": 1}'))
        answer = heard(one)
    found, error = error_in(answer)
    assert (found, error["code"]) == (status, code)
    assert (b"\r\nretry-after: " in answer) == (status == 503)
    assert b"secret" not in answer
    monkeypatch.undo()
    assert httpx.get(f"{plain}/health").status_code == 200


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
    assert [(one["status"], one["request_id"]) for one in fields] == [(200, "served"), (400, "refused")]


def test_a_body_that_does_not_arrive_is_given_up(hurried: str) -> None:
    with line(hurried) as one:
        one.sendall(POST + b"content-length: 100\r\n\r\n{")
        status, error = error_in(heard(one))
    assert (status, error["code"]) == (408, "body_timeout")


def test_a_body_without_end_is_refused_while_it_comes() -> None:
    settings = ServerSettings(max_body_bytes=1000, receive_timeout=1)
    with listening(FakeEngine, settings) as url, line(url) as one:
        one.sendall(POST + b"transfer-encoding: chunked\r\n\r\n" + b"ff\r\n" + b"a" * 255 + b"\r\n")
        one.sendall((b"ff\r\n" + b"a" * 255 + b"\r\n") * 3)
        assert error_in(heard(one))[0] == 413  # and the line does not stay open for the rest of it


@pytest.mark.parametrize("tail", [b"a: b\r\n" * 100_000, b"a: " + b"b" * 600_000])
def test_trailers_without_end_are_refused_too(narrow: str, tail: bytes) -> None:
    """More than one reading takes in. The line may be reset before the answer is read, since more lies there unread."""
    told = b""
    with line(narrow) as one, contextlib.suppress(ConnectionError):
        one.sendall(POST + b"transfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n" + tail)
        told = heard(one)
    assert not told or error_in(told)[0] == 431


def test_trailers_are_no_headers() -> None:
    with listening(FakeEngine, ServerSettings(api_keys=("k",))) as url, line(url) as one:
        one.sendall(POST + b"connection: close\r\ntransfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n")
        one.sendall(b"authorization: Bearer k\r\n\r\n")
        assert error_in(heard(one))[0] == 401


BODY = b'{"prompt": "a", "max_tokens": 1}'
FRAMED = (
    b"content-length: %d\r\n\r\n%b" % (len(BODY), BODY),
    b"transfer-encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY),
)


@pytest.mark.parametrize("framed", FRAMED)
@pytest.mark.parametrize("size", [1, 7, 10_000])
def test_an_offer_of_another_protocol_is_passed_over_and_its_body_read(plain: str, framed: bytes, size: int) -> None:
    """Clients of Java offer h2c with every request."""
    offer = POST + b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABk\r\n" + framed
    last = b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: Upgrade, close\r\nupgrade: websocket\r\n\r\n"
    said = offer + offer + last
    with line(plain) as one:
        for start in range(0, len(said), size):
            one.sendall(said[start : start + size])
        answer = heard(one)
    assert answer.count(b"HTTP/1.1 200 OK") == 3
    assert answer.count(b'"completion_tokens":1') == 2


def test_any_number_of_offers_may_come_together(plain: str) -> None:
    many = b"GET /version HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: h2c\r\n\r\n" * 1500
    with line(plain) as one:
        one.sendall(many + b"GET /version HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        assert heard(one).count(b"HTTP/1.1 200 OK") == 1501


@pytest.mark.parametrize(
    ("target", "status"),
    [
        (b"http://x/version", 200),
        (b"HTTPS://x:1/version?a=b", 200),
        (b"http://x", 200),
        (b"http://x/http://x/version", 404),
    ],
)
def test_a_target_may_name_the_server(plain: str, target: bytes, status: int) -> None:
    with line(plain) as one:
        one.sendall(b"GET %b HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n" % target)
        assert heard(one).startswith(b"HTTP/1.1 %d " % status)

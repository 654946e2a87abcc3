"""Class: HTTP that two parsers read differently, that has no end, or that is never read.

Published cases: Content-Length beside Transfer-Encoding (CVE-2026-40561, Starlet), trailers taken for headers or for
the next request (CVE-2025-59822, http4s), headers without a limit (CVE-2025-48956, vLLM), a chunked body without a
limit (CVE-2025-46728, cpp-httplib, which llama.cpp's server uses), memory of closed connections.
Compressed bodies are refused, so that none can be a bomb: test_middleware.
"""

import asyncio
import contextlib
import gc
import json
import logging
import os
import select
import socket
import time
from collections.abc import Callable, Iterator

import h11
import httpx
import pytest
import uvloop
from uvicorn.protocols.http.h11_impl import H11Protocol

from phase6_integration.server.app import create_app
from phase6_integration.server.settings import ServerSettings
from phase6_integration.server.transport import NO_LINGER
from tests.phase6_integration.adversarial.raw import PATIENCE, POST, error_in, heard, line, listening, request_of
from tests.phase6_integration.asgi import Call
from tests.phase6_integration.fake_engine import FakeEngine

HURRIED = ServerSettings(receive_timeout=1.0, send_timeout=0.2)  # for what is to be late, and for nothing else
NARROW = ServerSettings(max_body_bytes=1000, max_header_bytes=2000)


@pytest.fixture(scope="module")
def hurried() -> Iterator[str]:
    with listening(FakeEngine, HURRIED) as url:
        yield url


@pytest.fixture(scope="module")
def narrow() -> Iterator[str]:
    with listening(FakeEngine, NARROW) as url:
        yield url


def test_a_silent_connection_is_closed(hurried: str) -> None:
    with line(hurried) as one:
        assert heard(one) == b""


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


@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
@pytest.mark.parametrize("stream", [False, True])
def test_what_follows_the_last_request_does_not_cut_off_its_answer(stream: bool, version: bytes) -> None:
    made: list[tuple[FakeEngine, asyncio.AbstractEventLoop]] = []

    def make() -> FakeEngine:
        engine = FakeEngine()
        engine.flow.clear()
        made.append((engine, asyncio.get_running_loop()))
        return engine

    last = request_of(json.dumps({"prompt": "a", "max_tokens": 1, "stream": stream}).encode())
    last = last.replace(b"HTTP/1.1\r\n", b"HTTP/%b\r\nconnection: close\r\n" % version)
    with listening(make) as url, line(url) as one:
        one.sendall(last)
        engine, loop = made[0]
        deadline = time.monotonic() + PATIENCE
        while not engine.live and time.monotonic() < deadline:
            os.sched_yield()
        one.sendall(b"\r\n")
        httpx.get(f"{url}/health")  # by now the server has read it
        loop.call_soon_threadsafe(engine.flow.set)
        answer = heard(one)
    assert answer.startswith(b"HTTP/1.1 200 OK")
    assert (b"data: [DONE]\n\n" if stream else b'"completion_tokens":1') in answer


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


@pytest.mark.parametrize("loop", [uvloop.new_event_loop, asyncio.new_event_loop])
def test_a_client_that_leaves_a_little_unread_is_cut_off(loop: Callable[[], asyncio.AbstractEventLoop]) -> None:
    """The page is larger than what the kernel holds here, and smaller than what a transport holds by itself."""
    with listening(FakeEngine, ServerSettings(send_timeout=0.2), loop=loop, buffer=4096) as url:
        host, port = url.removeprefix("http://").split(":")
        with socket.socket() as one:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            one.connect((host, int(port)))
            one.sendall(b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
            watch = select.poll()
            watch.register(one, select.POLLHUP | select.POLLERR)
            assert watch.poll(PATIENCE * 1000)


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


@pytest.mark.parametrize("loop", [uvloop.new_event_loop, asyncio.new_event_loop])
def test_a_client_that_reads_slowly_is_served_to_its_end(loop: Callable[[], asyncio.AbstractEventLoop]) -> None:
    """It takes several times as long as a client may that reads nothing."""
    settings = ServerSettings(send_timeout=0.5)
    with listening(FakeEngine, settings, loop=loop, buffer=4096) as url:
        host, port = url.removeprefix("http://").split(":")
        with socket.socket() as one:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            one.connect((host, int(port)))
            one.sendall(b"GET /openapi.json HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
            whole = httpx.get(f"{url}/openapi.json").content
            begun, answer = time.monotonic(), b""
            while piece := one.recv(1 + len(whole) // 100):
                answer += piece
                while time.monotonic() - begun < 1.25 * min(len(answer) / len(whole), 1):
                    select.select([], [], [], 0.01)
            assert answer.endswith(whole)


def test_a_client_that_reads_nothing_is_cut_off(hurried: str) -> None:
    """It asks for far more than any buffer holds, on one line, and reads none of it."""
    with line(hurried) as one:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        one.sendall(b"GET /openapi.json HTTP/1.1\r\nhost: x\r\n\r\n" * 1000)
        watch = select.poll()
        watch.register(one, select.POLLHUP | select.POLLERR)
        assert watch.poll(PATIENCE * 1000)
    assert httpx.get(f"{hurried}/health").status_code == 200


def test_a_client_that_sends_a_second_request_and_leaves_takes_its_first_answer_with_it() -> None:
    made: list[tuple[FakeEngine, asyncio.AbstractEventLoop]] = []

    def make() -> FakeEngine:
        engine = FakeEngine()
        engine.flow.clear()
        made.append((engine, asyncio.get_running_loop()))
        return engine

    body = b'{"prompt": "a", "stream": true}'
    with listening(make, ServerSettings(keepalive=0.01)) as url:
        with line(url) as one:
            one.sendall(request_of(body))
            assert one.recv(65536).startswith(b"HTTP/1.1 200 OK")
            one.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
            one.recv(65536)
        (engine, loop), deadline = made[0], time.monotonic() + PATIENCE
        while engine.live and time.monotonic() < deadline:
            os.sched_yield()
        left = engine.live
        loop.call_soon_threadsafe(engine.flow.set)  # or a server that has not noticed would wait for it for ever
    assert left == 0


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


def test_two_requests_on_one_line_are_both_answered(plain: str) -> None:
    with line(plain) as one:
        one.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        one.sendall(b"GET /version HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        answer = heard(one)
    assert answer.count(b"HTTP/1.1 200 OK") == 2


@pytest.mark.parametrize("path", ["/", "/health", "/version", "/v1/models", "/metrics", "/openapi.json"])
def test_head_is_get_without_the_body(plain: str, path: str) -> None:
    got = httpx.get(plain + path)
    asked = httpx.head(plain + path)
    assert asked.status_code == got.status_code == 200
    assert (asked.content, asked.headers["content-length"]) == (b"", got.headers["content-length"])
    assert httpx.head(f"{plain}/v1/completions").status_code == 405


@pytest.mark.parametrize("loop", [uvloop.new_event_loop, asyncio.new_event_loop])
@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_in_http_1_0_has_no_chunks(stream: bool, loop: Callable[[], asyncio.AbstractEventLoop]) -> None:
    body = json.dumps({"prompt": "a", "max_tokens": 3, "stream": stream}).encode()
    with listening(FakeEngine, loop=loop) as url, line(url) as one:
        one.sendall(request_of(body).replace(b"HTTP/1.1", b"HTTP/1.0").replace(b"host: x\r\n", b""))
        head, _, content = heard(one).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK")
    assert b"transfer-encoding" not in head
    assert b"connection: close" in head.lower()
    assert (b"content-length" in head) != stream
    if stream:
        assert content.startswith(b"data: ")
        assert content.endswith(b"data: [DONE]\n\n")
        assert all(block.startswith(b"data: ") for block in content.split(b"\n\n")[:-1])
    else:
        assert json.loads(content)["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize("between", [b"", b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"])
def test_a_bad_request_is_not_answered_inside_another(plain: str, between: bytes) -> None:
    """While a response streams, whatever goes wrong with the next request must not be written into it."""
    with line(plain) as one:
        one.sendall(request_of(b'{"prompt": "a", "stream": true}') + between + b"GARBAGE\r\n\r\n")
        stream, end, rest = heard(one).partition(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    assert end
    assert b"bad_http" not in stream
    assert rest.count(b"HTTP/1.1 200 OK") == bool(between)
    assert error_in(rest[rest.index(b"HTTP/1.1 400 ") :])[1]["code"] == "bad_http"


@pytest.mark.parametrize("loop", [uvloop.new_event_loop, asyncio.new_event_loop])
def test_nothing_of_a_closed_connection_waits_for_a_collection(loop: Callable[[], asyncio.AbstractEventLoop]) -> None:
    """What does would be many megabytes under load: a collection of all that is old is rare."""
    settings = ServerSettings(idle_timeout=3600)
    body = json.dumps({"prompt": [5], "stream": True})
    asked = POST + b"content-length: %d\r\n\r\n" % len(body) + body.encode()
    offered = b"GET /health HTTP/1.1\r\nhost: x\r\nupgrade: h2c\r\nconnection: upgrade\r\n\r\n"
    with listening(FakeEngine, settings, loop=loop) as url:
        gc.collect()
        gc.disable()
        try:
            for said in (b"", asked, asked[:-5], asked * 2, b"\0", offered):
                with line(url) as client:
                    client.sendall(said)
                    if said:
                        client.shutdown(socket.SHUT_WR)
                        while client.recv(1 << 16):
                            continue
            with line(url) as client:  # is reset between two requests
                client.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
                assert client.recv(1 << 16)
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, NO_LINGER)
            assert httpx.post(f"{url}/v1/completions", json={"prompt": [5], "logprobs": 3, "n": 2}).status_code == 200
            deadline = time.monotonic() + PATIENCE
            while left := sum(getattr(type(one), "settings", None) is settings for one in gc.get_objects()):
                assert time.monotonic() < deadline, f"{left} are left"
        finally:
            gc.enable()

"""Class: connections that say nothing, that are not read, that carry several requests, or that end at any moment.

Published case: memory of closed connections.
"""

import asyncio
import gc
import json
import os
import select
import socket
import time
from collections.abc import Callable

import httpx
import pytest
import uvloop

from phase6_integration.api.settings import ServerSettings
from phase6_integration.wings.edge.transport import NO_LINGER
from tests.phase6_integration.adversarial.raw import PATIENCE, POST, Held, error_in, heard, line, listening, request_of
from tests.phase6_integration.fake_engine import FakeEngine


def test_a_silent_connection_is_closed(hurried: str) -> None:
    with line(hurried) as one:
        assert heard(one) == b""


@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
@pytest.mark.parametrize("stream", [False, True])
def test_what_follows_the_last_request_does_not_cut_off_its_answer(stream: bool, version: bytes) -> None:
    held = Held()
    last = request_of(json.dumps({"prompt": "a", "max_tokens": 1, "stream": stream}).encode())
    last = last.replace(b"HTTP/1.1\r\n", b"HTTP/%b\r\nconnection: close\r\n" % version)
    with listening(held) as url, line(url) as one:
        one.sendall(last)
        deadline = time.monotonic() + PATIENCE
        while not held.engine.live and time.monotonic() < deadline:
            os.sched_yield()
        one.sendall(b"\r\n")
        httpx.get(f"{url}/health")  # by now the server has read it
        held.release()
        answer = heard(one)
    assert answer.startswith(b"HTTP/1.1 200 OK")
    assert (b"data: [DONE]\n\n" if stream else b'"completion_tokens":1') in answer


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
    held = Held()
    body = b'{"prompt": "a", "stream": true}'
    with listening(held, ServerSettings(keepalive=0.01)) as url:
        with line(url) as one:
            one.sendall(request_of(body))
            assert one.recv(65536).startswith(b"HTTP/1.1 200 OK")
            one.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
            one.recv(65536)
        deadline = time.monotonic() + PATIENCE
        while held.engine.live and time.monotonic() < deadline:
            os.sched_yield()
        left = held.engine.live
        held.release()  # or a server that has not noticed would wait for it for ever
    assert left == 0


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

"""Class: connections that say nothing, that are not read, that carry several requests, or that end at any moment.

Published case: memory of closed connections.
"""

import asyncio
import contextlib
import gc
import json
import os
import select
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import httpx2
import pytest
import uvloop

from phase0_request.request import Request
from phase6_integration import connect
from phase6_integration.api.settings import ServerSettings
from phase6_integration.extras.edge.transport import NO_LINGER
from tests.phase6_integration.adversarial.raw import (
    PATIENCE,
    POST,
    Held,
    error_in,
    exchange,
    heard,
    line,
    listening,
    request_of,
)
from tests.phase6_integration.fake_engine import FakeEngine, Script

GET = b"GET /health HTTP/1.1\r\nhost: x\r\n"
on_both_loops = pytest.mark.parametrize("loop", [uvloop.new_event_loop, asyncio.new_event_loop])
Loop = Callable[[], asyncio.AbstractEventLoop]


def until(holds: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + PATIENCE
    while not holds() and time.monotonic() < deadline:
        os.sched_yield()
    return holds()


@contextmanager
def reading_little(url: str) -> Iterator[socket.socket]:
    """A client whose kernel holds next to nothing of what it does not read."""
    host, port = url.removeprefix("http://").split(":")
    with socket.socket() as end:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        end.connect((host, int(port)))
        yield end


def is_cut_off(end: socket.socket) -> bool:
    watch = select.poll()
    watch.register(end, select.POLLHUP | select.POLLERR)
    return bool(watch.poll(PATIENCE * 1000))


def test_a_silent_connection_is_closed(hurried: str) -> None:
    assert exchange(hurried) == b""


@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
@pytest.mark.parametrize("stream", [False, True])
def test_what_follows_the_last_request_does_not_cut_off_its_answer(stream: bool, version: bytes) -> None:
    held = Held()
    last = request_of(json.dumps({"prompt": "a", "max_tokens": 1, "stream": stream}).encode())
    last = last.replace(b"HTTP/1.1\r\n", b"HTTP/%b\r\nconnection: close\r\n" % version)
    with listening(held) as url, line(url) as end:
        end.sendall(last)
        assert until(lambda: held.engine.live > 0)
        end.sendall(b"\r\n")
        httpx2.get(f"{url}/health")  # by now the server has read it
        held.release()
        answer = heard(end)
    assert answer.startswith(b"HTTP/1.1 200 OK")
    assert (b"data: [DONE]\n\n" if stream else b'"completion_tokens":1') in answer


@on_both_loops
def test_a_client_that_leaves_a_little_unread_is_cut_off(loop: Loop) -> None:
    """The file is larger than what the kernel holds here, and smaller than what a transport holds by itself."""
    settings = connect.settings(send_timeout=0.2)
    with listening(FakeEngine, settings, loop=loop, buffer=4096) as url, reading_little(url) as end:
        end.sendall(b"GET /static/viewer/sources.json HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        assert is_cut_off(end)


@on_both_loops
def test_a_client_that_reads_slowly_is_served_to_its_end(loop: Loop) -> None:
    """It takes several times as long as a client may that reads nothing."""
    settings = connect.settings(send_timeout=0.5)
    with listening(FakeEngine, settings, loop=loop, buffer=4096) as url, reading_little(url) as end:
        end.sendall(b"GET /openapi.json HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        whole = httpx2.get(f"{url}/openapi.json").content
        begun, answer = time.monotonic(), b""
        while part := end.recv(1 + len(whole) // 100):
            answer += part
            while time.monotonic() - begun < 1.25 * min(len(answer) / len(whole), 1):
                select.select([], [], [], 0.01)
        assert answer.endswith(whole)


def test_a_client_that_reads_nothing_is_cut_off(hurried: str) -> None:
    """It asks for far more than any buffer holds, on one connection, and reads none of it."""
    with reading_little(hurried) as end:
        end.sendall(b"GET /openapi.json HTTP/1.1\r\nhost: x\r\n\r\n" * 1000)
        assert is_cut_off(end)
    assert httpx2.get(f"{hurried}/health").status_code == 200


class Endless(FakeEngine):
    """Generates tokens until the request is aborted."""

    async def _answer(self, request: Request, script: Script) -> None:
        while request.id in self._live:
            self.say(request.id, *request.prompt_tokens)
            await asyncio.sleep(0.001)


@on_both_loops
def test_the_requests_of_a_client_that_does_not_read_its_stream_are_aborted(loop: Loop) -> None:
    engine, body = Endless(), {"prompt": "Hello", "stream": True, "n": 2, "max_tokens": 1000}
    settings = connect.settings(send_timeout=0.5)
    with listening(lambda: engine, settings, loop=loop, buffer=4096) as url, reading_little(url) as end:
        end.sendall(request_of(json.dumps(body).encode()))
        assert is_cut_off(end)
        assert until(lambda: not engine.live)
        assert len(engine.dropped) == 2
        assert httpx2.get(f"{url}/stats").json()["requests"]["finished"]["abort"] == 2


def test_a_client_that_reads_next_to_nothing_is_cut_off() -> None:
    """A few bytes now and then would hold an answer in memory for as long as it likes."""
    with listening(FakeEngine, connect.settings(send_timeout=0.5), buffer=4096) as url, reading_little(url) as end:
        end.sendall(b"GET /openapi.json HTTP/1.1\r\nhost: x\r\n\r\n" * 100)
        watch, turns = select.poll(), 0
        watch.register(end, select.POLLHUP | select.POLLERR)
        while not watch.poll(50):
            with contextlib.suppress(ConnectionError):
                end.recv(100)
            turns += 1
            assert turns < PATIENCE * 20


def test_a_client_that_sends_a_second_request_and_leaves_takes_its_first_answer_with_it() -> None:
    held = Held()
    with listening(held, ServerSettings(keepalive=0.01)) as url:
        with line(url) as end:
            end.sendall(request_of(b'{"prompt": "a", "stream": true}'))
            assert end.recv(65536).startswith(b"HTTP/1.1 200 OK")
            end.sendall(GET + b"\r\n")
            end.recv(65536)
        left = until(lambda: not held.engine.live)
        held.release()  # or a server that has not noticed would wait for it for ever
    assert left


@pytest.mark.parametrize("path", ["/", "/health", "/version", "/v1/models", "/metrics", "/openapi.json"])
def test_head_is_get_without_the_body(plain: str, path: str) -> None:
    got, asked = httpx2.get(plain + path), httpx2.head(plain + path)
    assert asked.status_code == got.status_code == 200
    assert (asked.content, asked.headers["content-length"]) == (b"", got.headers["content-length"])
    assert httpx2.head(f"{plain}/v1/completions").status_code == 405


@on_both_loops
@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_in_http_1_0_has_no_chunks(stream: bool, loop: Loop) -> None:
    body = json.dumps({"prompt": "a", "max_tokens": 3, "stream": stream}).encode()
    with listening(FakeEngine, loop=loop) as url:
        answer = exchange(url, request_of(body).replace(b"HTTP/1.1", b"HTTP/1.0").replace(b"host: x\r\n", b""))
    head, _, content = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK")
    assert b"transfer-encoding" not in head
    assert b"connection: close" in head.lower()
    assert (b"content-length" in head) != stream
    if stream:
        assert content.endswith(b"data: [DONE]\n\n")
        assert all(block.startswith(b"data: ") for block in content.split(b"\n\n")[:-1])
    else:
        assert json.loads(content)["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize("between", [b"", GET + b"\r\n"])
def test_a_bad_request_is_not_answered_inside_another(plain: str, between: bytes) -> None:
    """While a response streams, whatever goes wrong with the next request must not be written into it."""
    answer = exchange(plain, request_of(b'{"prompt": "a", "stream": true}') + between + b"GARBAGE\r\n\r\n")
    stream, end, rest = answer.partition(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    assert end
    assert b"bad_http" not in stream
    assert rest.count(b"HTTP/1.1 200 OK") == bool(between)
    assert error_in(rest[rest.index(b"HTTP/1.1 400 ") :])[1]["code"] == "bad_http"


@on_both_loops
def test_nothing_of_a_closed_connection_waits_for_a_collection(loop: Loop) -> None:
    """What does would be many megabytes under load: a collection of all that is old is rare."""
    settings = ServerSettings(idle_timeout=3600)
    body = json.dumps({"prompt": [5], "stream": True})
    asked = POST + b"content-length: %d\r\n\r\n" % len(body) + body.encode()
    offered = GET + b"upgrade: h2c\r\nconnection: upgrade\r\n\r\n"
    with listening(FakeEngine, settings, loop=loop) as url:
        gc.collect()
        gc.disable()
        try:
            for sent in (b"", asked, asked[:-5], asked * 2, b"\0", offered):
                with line(url) as end:
                    end.sendall(sent)
                    if sent:
                        end.shutdown(socket.SHUT_WR)
                        heard(end)
            with line(url) as end:  # is reset between two requests
                end.sendall(GET + b"\r\n")
                assert end.recv(1 << 16)
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, NO_LINGER)
            assert httpx2.post(f"{url}/v1/completions", json={"prompt": [5], "logprobs": 3, "n": 2}).status_code == 200
            left = lambda: sum(getattr(type(one), "settings", None) is settings for one in gc.get_objects())  # noqa: E731
            assert until(lambda: not left())
        finally:
            gc.enable()

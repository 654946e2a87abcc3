"""Server-sent events through nginx and HAProxy, as `phase6_integration/deploy` sets them up. The engine is a script."""

import asyncio
import contextlib
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from phase0_request.request import FinishReason
from phase6_integration.api.settings import ServerSettings
from phase6_integration.lab.scale.upgrade import Proxy, certify, free_port
from tests.phase6_integration import running
from tests.phase6_integration.fake_engine import FakeEngine, served

SILENCE, TIMEOUT = 0.2, "1s"  # between two comments; of the proxy, in place of minutes
PROXIES = ["nginx", "haproxy"]
BODY = {"prompt": "Hello", "max_tokens": 99, "stream": True}


class Upstream:
    """The server behind a proxy, in a thread of its own, whose engine says what the test tells it to."""

    def __init__(self, engine: FakeEngine) -> None:
        self.engine, self.loop = engine, asyncio.get_running_loop()
        assert engine.tokenizer is not None
        self.tokens = engine.tokenizer.encode("A page of the cache holds the keys and values of a few tokens.")

    def say(self, token: int, reason: FinishReason | None = None) -> None:
        (request,) = self.engine.submitted
        self.loop.call_soon_threadsafe(lambda: self.engine.say(request.id, token, reason=reason))


def until(condition: Callable[[], Any], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with llm.key, and llm.pem, which holds the key too."""
    certify(directory := tmp_path_factory.mktemp("certificate"))
    return directory


@contextlib.contextmanager
def proxy(name: str, port: int, directory: Path, certificate: Path, timeout: str = TIMEOUT) -> Iterator[httpx2.Client]:
    """The proxy with its file of `deploy`. Nothing listens in the place of a second server."""
    one = Proxy(name, directory, certificate, timeout)
    one.configure(port, free_port())
    with one.run(), httpx2.Client(base_url=one.url, verify=False, timeout=20) as client:
        yield client


Through = tuple[httpx2.Client, Upstream]


@contextlib.contextmanager
def behind(name: str, directory: Path, certificate: Path, timeout: str = TIMEOUT) -> Iterator[Through]:
    """A client of the proxy, and what is behind it."""
    made: list[Upstream] = []

    def make() -> FakeEngine:
        engine = FakeEngine(script=None)
        made.append(Upstream(engine))
        return engine

    with served(make, ServerSettings(keepalive=SILENCE)) as url:
        port = int(url.rpartition(":")[2])
        with proxy(name, port, directory, certificate, timeout) as client:
            until(lambda: client.get("/health/ready").status_code == 200)  # HAProxy has checked it
            yield client, made[0]


@pytest.fixture(params=PROXIES)
def through(request: pytest.FixtureRequest, tmp_path: Path, certificate: Path) -> Iterator[Through]:
    with behind(request.param, tmp_path, certificate) as pair:
        yield pair


def test_tokens_arrive_one_by_one(through: Through) -> None:
    """Each is read before the next one is there."""
    client, upstream = through
    with client.stream("POST", "/v1/completions", json=BODY) as response:
        lines = (line for line in response.iter_lines() if line.startswith("data: "))
        for number, token in enumerate(upstream.tokens, 1):
            last = number == len(upstream.tokens)
            upstream.say(token, FinishReason.LENGTH if last else None)
            assert '"text"' in next(lines)
        assert [*lines][-1] == "data: [DONE]"
        assert response.headers["content-type"].startswith("text/event-stream")


def test_a_client_that_hangs_up_ends_its_stream(through: Through) -> None:
    client, upstream = through
    with client.stream("POST", "/v1/completions", json=BODY) as response:
        lines = (line for line in response.iter_lines() if line.startswith("data: "))
        for token in upstream.tokens[:3]:
            upstream.say(token)
            next(lines)
    client.close()
    until(lambda: upstream.engine.dropped)
    assert upstream.engine.dropped == [upstream.engine.submitted[0].id]


@pytest.mark.parametrize("name", PROXIES)
def test_a_client_that_hangs_up_in_silence_ends_its_request(name: str, tmp_path: Path, certificate: Path) -> None:
    """Nothing is sent before the whole answer is there, and the proxy would wait for it for a minute."""
    with behind(name, tmp_path, certificate, timeout="60s") as (client, upstream):
        address, trusting = (client.base_url.host, client.base_url.port), ssl._create_unverified_context()
        with trusting.wrap_socket(socket.create_connection(address)) as connection:
            connection.sendall(running.request(BODY | {"stream": False}))
            until(lambda: upstream.engine.submitted)
        until(lambda: upstream.engine.dropped)
        assert upstream.engine.dropped == [upstream.engine.submitted[0].id]


def test_a_stream_that_is_slow_is_not_cut(through: Through) -> None:
    """Comments come in the silence, for three times as long as the proxy waits."""
    client, upstream = through
    with client.stream("POST", "/v1/completions", json=BODY) as response:
        lines = response.iter_lines()
        for _ in range(15):
            assert next(line for line in lines if line) == ": keep-alive"
        upstream.say(upstream.tokens[0], FinishReason.LENGTH)
        assert [line for line in lines if line.startswith("data: ")][-1] == "data: [DONE]"


def test_figures_are_not_for_the_public(through: Through) -> None:
    """Nor under a path of `--root-path`. Paths that only begin like one of theirs are the server's."""
    client, _ = through
    hidden = ["/metrics", "/%6Detrics", "/stats", "/record", "/llm/metrics", "/llm/stats", "/llm/record"]
    hidden += ["/llm%2fmetrics", "/a/b%2Fst%61ts", "/llm/record?x=1", "/llm//record", "/record/"]
    assert {path: client.get(path).status_code for path in hidden} == dict.fromkeys(hidden, 403)
    assert [client.get(path).status_code for path in ("/v1/models", "/llm/records", "/llm")] == [200, 404, 404]


@pytest.mark.parametrize("name", PROXIES)
def test_a_request_is_sent_to_the_server_once(name: str, tmp_path: Path, certificate: Path) -> None:
    """Even if the server closes the connection in the place of an answer."""
    posts: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                with connection:
                    head = connection.recv(1 << 16)
                    if head.startswith(b"GET"):
                        connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
                    elif head:
                        posts.append(head)

        threading.Thread(target=serve, daemon=True).start()
        with proxy(name, listener.getsockname()[1], tmp_path, certificate) as client:
            until(lambda: client.get("/health/ready").status_code == 200)
            with contextlib.suppress(
                httpx2.RemoteProtocolError
            ):  # HAProxy closes too: it had used that connection before
                assert client.post("/v1/completions", json=BODY).status_code == 502
    assert len(posts) == 1

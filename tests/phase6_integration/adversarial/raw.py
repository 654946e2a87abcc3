"""Raw sockets against a real server with a scripted engine."""

import asyncio
import contextlib
import json
import os
import socket
from collections.abc import Callable, Iterator
from typing import Any

from phase6_integration.api.settings import ServerSettings
from phase6_integration.process.async_engine import AsyncEngine
from tests.phase6_integration.fake_engine import FakeEngine, served

POST = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
PATIENCE = 60.0  # seconds that a test waits for what must happen


class Held:
    """Makes an engine that gives no token until `release`, which may be called from another thread."""

    engine: FakeEngine

    def __call__(self) -> FakeEngine:
        self.engine, self._loop = FakeEngine(), asyncio.get_running_loop()
        self.engine.flow.clear()
        return self.engine

    def release(self) -> None:
        self._loop.call_soon_threadsafe(self.engine.flow.set)


@contextlib.contextmanager
def listening(make: Callable[[], AsyncEngine], settings: ServerSettings | None = None, **server: Any) -> Iterator[str]:
    """A server, once its port answers."""
    with served(make, settings, **server) as url:
        while not answers(url):
            os.sched_yield()
        yield url


def answers(url: str) -> bool:
    with contextlib.suppress(ConnectionRefusedError), line(url):
        return True
    return False


@contextlib.contextmanager
def line(url: str) -> Iterator[socket.socket]:
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=PATIENCE) as one:
        yield one


def exchange(url: str, *parts: bytes) -> bytes:
    """Send these, and return everything until the server closes the connection."""
    with line(url) as end:
        for part in parts:
            end.sendall(part)
        return heard(end)


def request_of(body: bytes) -> bytes:
    return POST + b"content-length: %d\r\n\r\n" % len(body) + body


def heard(one: socket.socket) -> bytes:
    """Everything until the server closes the line."""
    pieces = []
    with contextlib.suppress(ConnectionResetError):
        while piece := one.recv(65536):
            pieces.append(piece)
    return b"".join(pieces)


def error_in(response: bytes) -> tuple[int, dict[str, Any]]:
    """The status and the error of a response, which has a request id and the one shape."""
    head, _, body = response.partition(b"\r\n\r\n")
    assert b"\r\nx-request-id: " in head, response
    assert b"\r\ncontent-type: application/json" in head
    error = json.loads(body)["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    return int(head.split()[1]), error

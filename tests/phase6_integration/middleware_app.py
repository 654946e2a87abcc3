"""An application that records what reaches it through the middleware, and a call of it."""

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.middleware import Middleware
from starlette.middleware.exceptions import ExceptionMiddleware

from phase6_integration import connect
from phase6_integration.api.application import Exchanges
from phase6_integration.api.errors import RequestError, respond
from phase6_integration.api.settings import ServerSettings
from phase6_integration.extras.edge import middleware
from phase6_integration.extras.observe import access_log

KEYS = ("one", "two")
NO_WINGS = SimpleNamespace(state=SimpleNamespace(server=SimpleNamespace(error_bodies={})))  # of an application
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


def layers(settings: ServerSettings) -> list[Middleware]:
    """The middleware of an app with these settings, outermost first."""
    routes = Middleware(ExceptionMiddleware, handlers={RequestError: respond})
    return [access_log.layer(settings), Middleware(Exchanges), middleware.layer(settings), routes]


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
        "app": NO_WINGS,
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
    for one in reversed(layers(connect.settings(**settings))):
        stack = one.cls(stack, *one.args, **one.kwargs)
    asyncio.run(stack(scope, receive, send))
    if not sent:
        return Response(0, {}, b"")
    names = [name for name, _ in sent[0]["headers"]]
    assert len(names) == len(set(names))
    received = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
    return Response(sent[0]["status"], received, b"".join(m.get("body", b"") for m in sent[1:]))


def access_lines(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    return [vars(record)["fields"] for record in caplog.records if record.name == "nanoserve.access"]

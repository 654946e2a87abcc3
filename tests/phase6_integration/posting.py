"""Requests to a server with an engine that echoes, and the one shape of its errors."""

import asyncio
import json
from collections.abc import Mapping
from typing import Any

import httpx2

from phase6_integration import connect
from phase6_integration.api.settings import ServerSettings
from tests.phase6_integration import running
from tests.phase6_integration.fake_engine import FakeEngine, client

COMPLETE = "/v1/completions"
CHAT = "/v1/chat/completions"
PROMPT: dict[str, Any] = {"prompt": "Hello", "max_tokens": 2}
HELLO: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2}
BODIES = {COMPLETE: PROMPT, CHAT: HELLO}
SETTINGS = connect.settings(max_choices=8, max_logprobs=5)


def send(
    method: str,
    path: str,
    body: Any = None,
    engine: FakeEngine | None = None,
    settings: ServerSettings = SETTINGS,
    headers: Mapping[str, str] | None = None,
) -> httpx2.Response:
    """Send a request to a server with an engine that echoes. Bytes are sent as they are, other bodies as JSON."""

    async def main() -> httpx2.Response:
        content = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        kind = {} if body is None else {"content-type": "application/json"}
        async with client(engine or FakeEngine(), settings) as http:
            return await http.request(method, path, content=content, headers={**kind, **(headers or {})})

    return asyncio.run(main())


def post(path: str, body: Any, engine: FakeEngine | None = None, **more: Any) -> httpx2.Response:
    return send("POST", path, body, engine, **more)


def error_of(response: httpx2.Response) -> dict[str, Any]:
    """The error, which has the one shape, and a message."""
    error = running.error_of(response.json())
    assert isinstance(error["message"], str)
    assert error["message"]
    return error

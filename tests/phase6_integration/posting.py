"""Requests to a server with an engine that echoes, and the one shape of its errors."""

import asyncio
import json
from typing import Any

import httpx

from phase6_integration.api.settings import ServerSettings
from tests.phase6_integration import running
from tests.phase6_integration.fake_engine import FakeEngine, client

COMPLETE = "/v1/completions"
CHAT = "/v1/chat/completions"
PROMPT: dict[str, Any] = {"prompt": "Hello", "max_tokens": 2}
HELLO: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2}
BODIES = {COMPLETE: PROMPT, CHAT: HELLO}
SETTINGS = ServerSettings(max_choices=8, max_logprobs=5)


def post(path: str, body: Any, engine: FakeEngine | None = None, **more: Any) -> httpx.Response:
    """Send a POST to a server with an engine that echoes. Bytes are sent as they are, other bodies as JSON."""

    async def send() -> httpx.Response:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"content-type": "application/json", **more.pop("headers", {})}
        async with client(engine or FakeEngine(), SETTINGS) as http:
            return await http.post(path, content=content, headers=headers, **more)

    return asyncio.run(send())


def error_of(response: httpx.Response) -> dict[str, Any]:
    """The error, which has the one shape, and a message."""
    error = running.error_of(response.json())
    assert isinstance(error["message"], str)
    assert error["message"]
    return error

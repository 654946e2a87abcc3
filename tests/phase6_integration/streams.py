"""What the tests of both routes share: requests to an app, a body for each, and the text of an event."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import httpx2

from phase6_integration.api.settings import ServerSettings
from phase6_integration.process.async_engine import AsyncEngine
from tests.phase6_integration.fake_engine import client, events

PATHS = ("/v1/completions", "/v1/chat/completions")
LINE_BREAKS = "a\na\x0ba\x0ca\ra\x1ca\x1da\x1ea\x85a\u2028a\u2029a"  # all those of `str.splitlines`
HELLO = [{"role": "user", "content": "Hello"}]


def body(path: str, **more: Any) -> dict[str, Any]:
    prompt = {"messages": HELLO} if "chat" in path else {"prompt": "Hello"}
    return {**prompt, "max_tokens": 8, **more}


def text_of(event: dict[str, Any]) -> str:
    choice = event["choices"][0]
    return str(choice["delta"].get("content", "") if "delta" in choice else choice["text"])


def run(test: Callable[[], Awaitable[None]]) -> None:
    try:
        asyncio.run(asyncio.wait_for(test(), 60))  # a stream that never ends is a failure, not a hang
    except TimeoutError:
        raise AssertionError(
            "what the test waits for has not come in 60 seconds: an event, a comment or the end"
        ) from None


def post(engine: AsyncEngine, path: str, settings: ServerSettings | None = None, **body: Any) -> httpx2.Response:
    async def send() -> httpx2.Response:
        async with client(engine, settings) as http:
            response = await http.post(path, json=body)
            assert isinstance(response, httpx2.Response)
            return response

    return asyncio.run(send())


def chunks_of(response: httpx2.Response) -> list[Any]:
    """The chunks of a stream, which ends with [DONE]."""
    *chunks, done = events(response.content)
    assert done == "[DONE]"
    return [json.loads(chunk) for chunk in chunks]

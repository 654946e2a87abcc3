"""What the tests of streams share: both routes, a body for each, and the text of an event."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

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
    asyncio.run(asyncio.wait_for(test(), 60))  # a stream that never ends is a failure, not a hang

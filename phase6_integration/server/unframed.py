"""Unframed: an answer to a client of HTTP/1.0, which knows no chunks: what has no length ends where the line ends.

uvicorn would send chunks to it. A length that is never used up keeps it from that; the last piece then uses it up.
"""

from typing import Any

from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

_ENDLESS = 1 << 62


def unframed(app: ASGI3Application, cycle: RequestResponseCycle) -> ASGI3Application:
    async def answer(scope: Any, receive: Any, send: Any) -> None:
        async def sent(message: Any) -> None:
            if message["type"] == "http.response.start":
                if all(name.lower() != b"content-length" for name, _ in message.get("headers", ())):
                    cycle.chunked_encoding, cycle.expected_content_length = False, _ENDLESS
            elif cycle.expected_content_length > _ENDLESS // 2 and not message.get("more_body", False):
                cycle.expected_content_length = len(message.get("body", b""))
            await send(message)

        await app(scope, receive, sent)

    return answer

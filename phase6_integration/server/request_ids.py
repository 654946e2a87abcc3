"""RequestIds: every request has a name, and its response carries it."""

import re
import uuid
from collections.abc import Iterable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

HEADER = b"x-request-id"
_SANE = re.compile(rb"[!-~]{1,128}")


def request_id(headers: Iterable[tuple[bytes, bytes]]) -> str:
    """The client's name for its request, if it sent just one that may stand in a header and a log; else a new one."""
    given = [value for name, value in headers if name == HEADER]
    if len(given) == 1 and _SANE.fullmatch(given[0]):
        return given[0].decode("ascii")
    return uuid.uuid4().hex


class RequestIds:
    """Puts `request_id` into the state of the scope, and `x-request-id` on whatever response is sent."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        name = request_id(scope["headers"])
        scope.setdefault("state", {})["request_id"] = name

        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                kept = [(key, value) for key, value in message.get("headers", ()) if key.lower() != HEADER]
                message = {**message, "headers": [*kept, (HEADER, name.encode("ascii"))]}
            await send(message)

        return await self.app(scope, receive, named)

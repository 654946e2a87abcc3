"""What a request may bring: so many headers, a body of JSON, so many bytes, within so many seconds."""

import asyncio

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from phase6_integration.server.refusals import refuse
from phase6_integration.server.settings import ServerSettings

_WITH_BODY = frozenset({"POST", "PUT", "PATCH"})
_CLOSE = ((b"connection", b"close"),)


class HeaderLimits:
    """At most so many headers of so many bytes together."""

    def __init__(self, app: ASGIApp, settings: ServerSettings) -> None:
        self.app = app
        self.settings = settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        headers, limits = scope["headers"], self.settings
        if len(headers) > limits.max_headers:
            message = f"the request has {len(headers)} headers; at most {limits.max_headers} are read"
            return await refuse(send, 431, message, "headers_too_large", _CLOSE)
        size = sum(len(name) + len(value) for name, value in headers)
        if size > limits.max_header_bytes:
            message = f"the headers have {size} bytes; at most {limits.max_header_bytes} are read"
            return await refuse(send, 431, message, "headers_too_large", _CLOSE)
        return await self.app(scope, receive, send)


class TooLargeError(Exception):
    """A body grew beyond its limit while it was read."""


class BodyLimits:
    """Reads the body, whole, before anyone else is asked: a route only ever meets one that is JSON and small enough.

    The body then arrives in one piece; what the client does after it (leave, most of all) is passed on as it comes.
    """

    def __init__(self, app: ASGIApp, settings: ServerSettings) -> None:
        self.app = app
        self.settings = settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        headers = dict(scope["headers"])
        length = headers.get(b"content-length")
        has_body = b"transfer-encoding" in headers or (length is not None and length != b"0")
        if not has_body:
            return await self.app(scope, receive, send)
        if scope["method"] in _WITH_BODY and not _is_json(headers.get(b"content-type", b"")):
            message = "the body must be JSON: send it with `Content-Type: application/json`"
            return await refuse(send, 415, message, "unsupported_media_type")
        limit = self.settings.max_body_bytes
        try:
            if length is not None and (not length.isdigit() or int(length) > limit):
                raise TooLargeError
            async with asyncio.timeout(self.settings.receive_timeout):
                body = await _read(receive, limit)
        except TooLargeError:
            return await refuse(send, 413, f"the body is too large: at most {limit} bytes are read", "body_too_large")
        except TimeoutError:
            message = f"the body did not arrive within {self.settings.receive_timeout:g} seconds"
            return await refuse(send, 408, message, "body_timeout", _CLOSE)
        if body is None:  # the client has left: there is no one to answer
            return None
        return await self.app(scope, _replay(body, receive), send)


async def _read(receive: Receive, limit: int) -> bytes | None:
    """The whole body, or None if the client left before its end."""
    pieces: list[bytes] = []
    size, more = 0, True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        pieces.append(message.get("body", b""))
        size += len(pieces[-1])
        more = message.get("more_body", False)
        if size > limit:
            raise TooLargeError
    return b"".join(pieces)


def _replay(body: bytes, receive: Receive) -> Receive:
    """`receive`, as if the whole body were just coming in."""
    first: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replayed() -> Message:
        return first.pop() if first else await receive()

    return replayed


def _is_json(content_type: bytes) -> bool:
    kind = content_type.split(b";", 1)[0].strip().lower()
    return kind == b"application/json" or (kind.startswith(b"application/") and kind.endswith(b"+json"))

"""What a request may bring: a host, so many headers, a body of plain JSON, so many bytes, within so many seconds."""

import asyncio

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from phase6_integration.server.errors import RequestError
from phase6_integration.server.settings import ServerSettings

_WITH_BODY = frozenset({"POST", "PUT", "PATCH"})
_CODINGS = frozenset({b"gzip", b"x-gzip", b"deflate", b"compress", b"x-compress", b"br", b"zstd"})
_CLOSE = {"connection": "close"}
_PLAIN = {"accept-encoding": "identity"}


class HeaderLimits:
    """At most so many headers of so many bytes together; one of them, since HTTP/1.1, is the host."""

    def __init__(self, app: ASGIApp, settings: ServerSettings) -> None:
        self.app = app
        self.settings = settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        count = len(scope["headers"])
        size = sum(len(name) + len(value) for name, value in scope["headers"])
        if count > self.settings.max_headers or size > self.settings.max_header_bytes:
            return await headers_too_large(self.settings).response(scope, receive, send)
        hosts = sum(name == b"host" for name, _ in scope["headers"])
        if hosts != 1 and (hosts or scope["http_version"] != "1.0"):
            error = RequestError(400, f"one Host header is needed, got {hosts}", code="bad_http", headers=_CLOSE)
            return await error.response(scope, receive, send)
        return await self.app(scope, receive, send)


def headers_too_large(limits: ServerSettings) -> RequestError:
    message = f"the headers are too large: at most {limits.max_headers} of {limits.max_header_bytes} bytes are read"
    return RequestError(431, message, code="headers_too_large", headers=_CLOSE)


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
            return await RequestError(415, message, code="unsupported_media_type").response(scope, receive, send)
        coding = headers.get(b"content-encoding", b"identity").strip().lower()
        if coding != b"identity":
            name = coding.decode() if coding in _CODINGS else "in the way that its Content-Encoding says"
            message = f"the body may not be encoded, got {name}: send it as it is"
            refusal = RequestError(415, message, code="unsupported_content_encoding", headers=_PLAIN)
            return await refusal.response(scope, receive, send)
        try:
            body = await self._read(receive, length)
        except RequestError as refusal:
            return await refusal.response(scope, receive, send)
        if body is None:  # the client has left: there is no one to answer
            return None
        return await self.app(scope, _replay(body, receive), send)

    async def _read(self, receive: Receive, length: bytes | None) -> bytes | None:
        """The whole body, or None if the client left before its end."""
        limit, seconds = self.settings.max_body_bytes, self.settings.receive_timeout
        too_large = RequestError(413, f"the body is too large: at most {limit} bytes are read", code="body_too_large")
        if length is not None and (not length.isdigit() or int(length) > limit):
            raise too_large
        pieces: list[bytes] = []
        size, more = 0, True
        try:
            async with asyncio.timeout(seconds):
                while more:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return None
                    pieces.append(message.get("body", b""))
                    size += len(pieces[-1])
                    more = message.get("more_body", False)
                    if size > limit:
                        raise too_large
        except TimeoutError:
            late = f"the body did not arrive within {seconds:g} seconds"
            raise RequestError(408, late, code="body_timeout", headers=_CLOSE) from None
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

"""ASGI middleware of every request, outermost first: root path, request id, access log, headers, CORS, last resort,
host, API key, what is not served, body, HEAD.

A route finds `request.state.request_id`, `request.state.tenant`, and `request.state.account`, which it fills for the
access log.
"""

import asyncio
import hashlib
import hmac
import ipaddress
import logging
import re
import secrets
import uuid
from collections.abc import Iterable

from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from phase6_integration.server.api_keys import ApiKeys, digest
from phase6_integration.server.budget import Budget, Lease
from phase6_integration.server.errors import RequestError, overloaded
from phase6_integration.server.logs import AccessLog
from phase6_integration.server.not_served import NotServed
from phase6_integration.server.origins import AllowedHosts, cors
from phase6_integration.server.root_path import RootPath
from phase6_integration.server.settings import ServerSettings

logger = logging.getLogger("nanoserve")

BY_KEY, BY_ADDRESS = "key-", "address-"  # how tenants are known: ids begin with it
PUBLIC = frozenset({"/", "/health", "/health/live", "/health/ready", "/ping", "/version"})  # routes without an API key
REQUEST_ID = b"x-request-id"
_SANE_ID = re.compile(rb"[!-~]{1,128}")
_WITH_BODY = frozenset({"POST", "PUT", "PATCH"})
_CODINGS = frozenset({b"gzip", b"x-gzip", b"deflate", b"compress", b"x-compress", b"br", b"zstd"})
_CHALLENGE = {"www-authenticate": "Bearer"}
_CLOSE = {"connection": "close"}
_PLAIN = {"accept-encoding": "identity"}


def middleware(settings: ServerSettings, keys: ApiKeys | None = None) -> list[Middleware]:
    """For an app with these settings. `keys` replaces the API keys of the settings, and may change while it runs."""
    hosts = [Middleware(AllowedHosts, allowed=settings.allowed_hosts)] if settings.allowed_hosts else []
    return [
        *([Middleware(RootPath, root=settings.root_path)] if settings.root_path else []),
        Middleware(RequestIds),
        Middleware(AccessLog),
        Middleware(HeaderLimits, settings=settings),  # CORS answers some requests itself
        *cors(settings),
        Middleware(LastResort),
        *hosts,
        Middleware(Auth, keys=keys or ApiKeys(settings.api_keys)),
        Middleware(NotServed),
        Middleware(BodyLimits, settings=settings),
        Middleware(Heads),
    ]


def request_id(headers: Iterable[tuple[bytes, bytes]]) -> str:
    """The client's request id, if it sent exactly one that is safe in a header and a log; otherwise a new one."""
    given = [value for name, value in headers if name == REQUEST_ID]
    if len(given) == 1 and _SANE_ID.fullmatch(given[0]):
        return given[0].decode("ascii")
    return uuid.uuid4().hex


class RequestIds:
    """Sets `request.state.request_id`, and the header `x-request-id` of every response."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        name = request_id(scope["headers"])
        scope.setdefault("state", {})["request_id"] = name

        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                kept = [(key, value) for key, value in message.get("headers", ()) if key.lower() != REQUEST_ID]
                message = {**message, "headers": [*kept, (REQUEST_ID, name.encode("ascii"))]}
            await send(message)

        return await self.app(scope, receive, named)


class LastResort:
    """Turns an exception into a 500 with a request id and no details, which are logged; and a request that is cancelled
    because the server ends into a 503."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        name, started = scope["state"]["request_id"], False

        async def noted(message: Message) -> None:
            nonlocal started
            started = started or message["type"] == "http.response.start"
            await send(message)

        try:
            return await self.app(scope, receive, noted)
        except asyncio.CancelledError:
            logger.info("a request was cut off by the end of the server", extra={"fields": {"id": name}})
            if not started:
                message = "the server has ended; try again later"
                await RequestError(503, message, code="stopped", headers={"retry-after": "10"}).response(
                    scope, receive, send
                )
            return None
        except Exception as error:
            logger.exception("a request failed by a fault of the server", extra={"fields": {"id": name}})
            if not started:
                message = f"the server failed on this request; its log says why under the id {name}"
                fault = RequestError(500, message, code="internal_error")
                refusal = overloaded() if isinstance(error, MemoryError) else fault
                await refusal.response(scope, receive, send)
            return None  # an unfinished response: the server closes the connection, which the client notices


class HeaderLimits:
    """Limits the number and the size of headers, and requires one Host header and one framing, as HTTP/1.1 does."""

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
        names = [name for name, _ in scope["headers"]]
        hosts, fault = names.count(b"host"), None
        if hosts != 1 and (hosts or scope["http_version"] != "1.0"):
            fault = f"one Host header is needed, got {hosts}"
        elif b"content-length" in names and b"transfer-encoding" in names:
            fault = "a body has a Content-Length or a Transfer-Encoding, not both"  # servers disagree where it ends
        if fault is not None:
            return await RequestError(400, fault, code="bad_http", headers=_CLOSE).response(scope, receive, send)
        return await self.app(scope, receive, send)


def headers_too_large(limits: ServerSettings) -> RequestError:
    message = f"the headers are too large: at most {limits.max_headers} of {limits.max_header_bytes} bytes are read"
    return RequestError(431, message, code="headers_too_large", headers=_CLOSE)


class Auth:
    """Requires a bearer key on every route that is not public. All digests are always compared, in constant time.

    It also tells clients apart, by their keys, or by their addresses if none are needed: `request.state.tenant` is an
    id of the client. It does not reveal key or address, and changes with every start of the server.
    """

    def __init__(self, app: ASGIApp, keys: ApiKeys) -> None:
        self.app = app
        self.keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        key = self._known_key(scope["headers"])
        if key is not None or not self.keys.digests or scope["path"] in PUBLIC:
            scope["state"]["tenant"] = _tenant(BY_ADDRESS, _network(scope)) if key is None else _tenant(BY_KEY, key)
            return await self.app(scope, receive, send)
        message = "a valid API key is needed: send it as `Authorization: Bearer <key>`"
        refusal = RequestError(401, message, code="invalid_api_key", headers=_CHALLENGE)
        return await refusal.response(scope, receive, send)

    def _known_key(self, headers: Iterable[tuple[bytes, bytes]]) -> bytes | None:
        given = [value for name, value in headers if name == b"authorization"]
        scheme, _, key = given[0].partition(b" ") if len(given) == 1 else (b"", b"", b"")
        key = key.strip()
        ours = digest(key)
        matches = [hmac.compare_digest(ours, known) for known in self.keys.digests]
        return key if scheme.lower() == b"bearer" and any(matches) else None


_SECRET = secrets.token_bytes(16)


def _tenant(kind: str, client: bytes) -> str:
    return kind + hashlib.blake2b(client, key=_SECRET, digest_size=8).hexdigest()


def _network(scope: Scope) -> bytes:
    """The client's IPv4 address, or the first half of its IPv6 address: one client has all addresses of a /64."""
    host = (scope.get("client") or ("",))[0]
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return str(host).encode()
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).packed[:8]


class BodyLimits:
    """Reads the whole body before any route runs: JSON, not encoded, within the limits of size and time."""

    def __init__(self, app: ASGIApp, settings: ServerSettings) -> None:
        self.app = app
        self.settings = settings
        self.budget = Budget.for_bodies(settings.max_buffered_bytes)

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
        with self.budget.lease() as lease:
            try:
                body = await self._read(receive, length, lease)
            except RequestError as refusal:
                return await refusal.response(scope, receive, send)
            if body is None:  # the client has disconnected
                return None
            return await self.app(scope, _replay(body, receive), send)

    async def _read(self, receive: Receive, length: bytes | None, lease: Lease) -> bytes | None:
        """The whole body, or None if the client disconnected before its end."""
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
                    lease.cover(size)
        except TimeoutError:
            late = f"the body did not arrive within {seconds:g} seconds"
            raise RequestError(408, late, code="body_timeout", headers=_CLOSE) from None
        return b"".join(pieces)


def _replay(body: bytes, receive: Receive) -> Receive:
    """A `receive` that yields the body first."""
    first: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replayed() -> Message:
        return first.pop() if first else await receive()

    return replayed


def _is_json(content_type: bytes) -> bool:
    kind = content_type.split(b";", 1)[0].strip().lower()
    return kind == b"application/json" or (kind.startswith(b"application/") and kind.endswith(b"+json"))


class Heads:
    """Serves HEAD as GET; uvicorn leaves out the body."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        head = scope["type"] == "http" and scope["method"] == "HEAD"
        await self.app({**scope, "method": "GET"} if head else scope, receive, send)

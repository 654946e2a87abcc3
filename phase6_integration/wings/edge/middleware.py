"""ASGI middleware of every request, outermost first: path, request id, access log, headers, CORS, error responses,
checks of the head, body, HEAD.

A route finds `request.state.request_id`, `request.state.tenant`, and `request.state.account`, which it fills for the
access log. A RequestError may be raised anywhere behind ErrorResponses.
"""

import asyncio
import hashlib
import hmac
import ipaddress
import logging
import re
import secrets
import time
import uuid
from collections.abc import Iterable
from itertools import chain

from fastapi import Response
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from phase6_integration.api.errors import RequestError, fault, overloaded
from phase6_integration.api.settings import ServerSettings
from phase6_integration.wings.edge.api_keys import ApiKeys, digest
from phase6_integration.wings.edge.memory_budget import Budget, Lease
from phase6_integration.wings.edge.not_served import check_served
from phase6_integration.wings.edge.origins import check_host, cors
from phase6_integration.wings.observe.logs import Account

logger = logging.getLogger("nanoserve")
access = logging.getLogger("nanoserve.access")

BY_KEY, BY_ADDRESS = "key-", "address-"  # how tenants are known: ids begin with it
PUBLIC = frozenset({"/", "/health", "/health/live", "/health/ready", "/ping", "/version"})  # routes without an API key
REQUEST_ID = b"x-request-id"
CLIENT_LEFT = 499  # logged, never sent
_POLLED = frozenset(
    {"/health", "/health/live", "/health/ready", "/ping", "/load", "/v1/load", "/metrics", "/stats"}
)  # logged at debug level while they succeed, and while the model loads
_LONGEST_PATH = 200  # characters of a path in the log
_ABSOLUTE = re.compile(r"^https?://[^/]*", re.IGNORECASE)  # a request may name the server before the path
_SANE_ID = re.compile(rb"[!-~]{1,128}")
_WITH_BODY = frozenset({"POST", "PUT", "PATCH"})
_CODINGS = frozenset({b"gzip", b"x-gzip", b"deflate", b"compress", b"x-compress", b"br", b"zstd"})
_CLOSE = {"connection": "close"}


def middleware(settings: ServerSettings, keys: ApiKeys | None = None) -> list[Middleware]:
    """For an app with these settings. `keys` replaces the API keys of the settings, and may change while it runs."""
    return [
        Middleware(Paths, root=settings.root_path),
        Middleware(RequestIds),
        Middleware(AccessLog),
        Middleware(HeaderLimits, settings=settings),  # CORS answers some requests itself
        *cors(settings),
        Middleware(ErrorResponses),
        Middleware(HeadChecks, settings=settings, keys=keys or ApiKeys(settings.api_keys)),
        Middleware(BodyLimits, settings=settings),
        Middleware(Heads),
    ]


class HttpMiddleware:
    """Handles HTTP requests. Anything else, such as a server's lifespan, goes on to the application."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await (self.handle if scope["type"] == "http" else self.app)(scope, receive, send)

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        raise NotImplementedError


class Paths(HttpMiddleware):
    """Takes off a request's path what is before a route: scheme and host, which any client may send, and the path under
    which a proxy passes this server on, such as /llm. A proxy that has taken that off already may leave it out."""

    def __init__(self, app: ASGIApp, root: str | None) -> None:
        super().__init__(app)
        self.root = root or ""

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = _ABSOLUTE.sub("", scope["path"]) or "/"
        if self.root and f"{path}/".startswith(f"{self.root}/"):
            path = path.removeprefix(self.root) or "/"
        await self.app(scope if path == scope["path"] else {**scope, "path": path}, receive, send)


def request_id(headers: Iterable[tuple[bytes, bytes]]) -> str:
    """The client's request id, if it sent exactly one that is safe in a header and a log; otherwise a new one."""
    given = [value for name, value in headers if name == REQUEST_ID]
    if len(given) == 1 and _SANE_ID.fullmatch(given[0]):
        return given[0].decode("ascii")
    return uuid.uuid4().hex


class RequestIds(HttpMiddleware):
    """Sets `request.state.request_id`, and the header `x-request-id` of every response."""

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        name = request_id(scope["headers"])
        scope.setdefault("state", {})["request_id"] = name

        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                kept = [(key, value) for key, value in message.get("headers", ()) if key.lower() != REQUEST_ID]
                message = {**message, "headers": [*kept, (REQUEST_ID, name.encode("ascii"))]}
            await send(message)

        await self.app(scope, receive, named)


class AccessLog(HttpMiddleware):
    """Sets `request.state.account` and logs it, with status and duration, when the request is over."""

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        start = time.perf_counter()
        account = scope["state"]["account"] = Account()
        status = 0
        sent = left = False

        async def counted(message: Message) -> None:
            nonlocal status, sent
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)
            if message["type"] == "http.response.body" and not message.get("more_body", False):
                sent = True

        async def watched() -> Message:
            nonlocal left
            message = await receive()
            left = left or (message["type"] == "http.disconnect" and not sent)
            return message

        try:
            await self.app(scope, watched, counted)
        finally:
            ended = status if sent and not left else CLIENT_LEFT
            fields = {
                "id": scope["state"]["request_id"],
                "method": scope["method"],
                "path": _path(scope),
                "status": ended,
                **account.fields(),
                "total": round(time.perf_counter() - start, 6),
            }
            polled = scope["path"] in _POLLED and (ended == 200 or account.code == "loading")
            access.log(logging.DEBUG if polled else logging.INFO, "request", extra={"fields": fields})


def _path(scope: Scope) -> str:
    """The path as sent, still percent-encoded, so that it cannot contain a line break. The query is not logged."""
    return bytes(scope.get("raw_path") or b"").decode("latin-1")[:_LONGEST_PATH] or str(scope["path"])[:_LONGEST_PATH]


class ErrorResponses(HttpMiddleware):
    """Turns an exception into an error response in OpenAI's format: a RequestError into its own, and any other into a
    500 with a request id and no details, which are logged. A request that is cancelled because the server ends gets a
    503. A response that has begun stays unfinished: the server closes the connection, which the client notices."""

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        name, started = scope["state"]["request_id"], False

        async def noted(message: Message) -> None:
            nonlocal started
            started = started or message["type"] == "http.response.start"
            await send(message)

        async def refuse(error: RequestError) -> None:
            if not started:
                await respond(error, scope, receive, send)

        try:
            await self.app(scope, receive, noted)
        except asyncio.CancelledError:
            logger.info("a request was cut off by the end of the server", extra={"fields": {"id": name}})
            message = "the server has ended; try again later"
            await refuse(RequestError(503, message, code="stopped", headers={"retry-after": "10"}))
        except Exception as error:
            if started or not isinstance(error, RequestError):
                logger.exception("a request failed by a fault of the server", extra={"fields": {"id": name}})
            unexpected = overloaded() if isinstance(error, MemoryError) else fault(name)
            await refuse(error if isinstance(error, RequestError) else unexpected)


async def respond(error: RequestError, scope: Scope, receive: Receive, send: Send) -> None:
    """Send an error response, and note it for the access log."""
    scope["state"]["account"].code, scope["state"]["account"].param = error.code, error.param
    await Response(error.content, error.status, error.headers, media_type="application/json")(scope, receive, send)


class HeaderLimits(HttpMiddleware):
    """Answers a request with 431 if its headers exceed the limits, and with 400 if they break HTTP/1.1."""

    def __init__(self, app: ASGIApp, settings: ServerSettings) -> None:
        super().__init__(app)
        self.settings = settings

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            check_headers(scope, self.settings)
        except RequestError as error:
            return await respond(error, scope, receive, send)
        return await self.app(scope, receive, send)


class HeadChecks(HttpMiddleware):
    """Refuses a request by its head: a wrong Host, no API key, a route that is not served. Sets
    `request.state.tenant`."""

    def __init__(self, app: ASGIApp, settings: ServerSettings, keys: ApiKeys) -> None:
        super().__init__(app)
        self.settings = settings
        self.keys = keys

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        check_host(scope["headers"], self.settings.allowed_hosts)
        scope["state"]["tenant"] = authenticate(scope, self.keys)
        check_served(scope["path"])
        await self.app(scope, receive, send)


def check_headers(scope: Scope, limits: ServerSettings) -> None:
    """Limit the number and the size of headers, and require one Host header and one framing, as HTTP/1.1 does."""
    headers = scope["headers"]
    if len(headers) > limits.max_headers or sum(map(len, chain(*headers))) > limits.max_header_bytes:
        raise headers_too_large(limits)
    names = [name for name, _ in headers]
    hosts, wrong = names.count(b"host"), None
    if hosts != 1 and (hosts or scope["http_version"] != "1.0"):
        wrong = f"one Host header is needed, got {hosts}"
    elif b"content-length" in names and b"transfer-encoding" in names:  # servers disagree where such a body ends
        wrong = "a body has a Content-Length or a Transfer-Encoding, not both"
    if wrong is not None:
        raise RequestError(400, wrong, code="bad_http", headers=_CLOSE)


def headers_too_large(limits: ServerSettings) -> RequestError:
    message = f"the headers are too large: at most {limits.max_headers} of {limits.max_header_bytes} bytes are read"
    return RequestError(431, message, code="headers_too_large", headers=_CLOSE)


def authenticate(scope: Scope, keys: ApiKeys) -> str:
    """Return the tenant of a request: a hash of its API key or, if it has none, of its network address.

    A request without a valid key is a 401, unless the server has no keys or the route is public. A key is compared with
    all digests in constant time. The hash has a new secret at every start of the server.
    """
    key = _known_key(scope["headers"], keys)
    if key is not None:
        return _tenant(BY_KEY, key)
    if not keys.digests or scope["path"] in PUBLIC:
        return _tenant(BY_ADDRESS, _network(scope))
    message = "a valid API key is needed: send it as `Authorization: Bearer <key>`"
    raise RequestError(401, message, code="invalid_api_key", headers={"www-authenticate": "Bearer"})


def _known_key(headers: Iterable[tuple[bytes, bytes]], keys: ApiKeys) -> bytes | None:
    given = [value for name, value in headers if name == b"authorization"]
    scheme, _, key = given[0].partition(b" ") if len(given) == 1 else (b"", b"", b"")
    key = key.strip()
    ours = digest(key)
    matches = [hmac.compare_digest(ours, known) for known in keys.digests]
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


class BodyLimits(HttpMiddleware):
    """Reads the whole body before any route runs: JSON, not encoded, within the limits of size and time."""

    def __init__(self, app: ASGIApp, settings: ServerSettings) -> None:
        super().__init__(app)
        self.settings = settings
        self.budget = Budget.for_bodies(settings.max_buffered_bytes)

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = dict(scope["headers"])
        length = headers.get(b"content-length")
        if b"transfer-encoding" not in headers and length in (None, b"0"):
            return await self.app(scope, receive, send)
        if scope["method"] in _WITH_BODY and not _is_json(headers.get(b"content-type", b"")):
            message = "the body must be JSON: send it with `Content-Type: application/json`"
            raise RequestError(415, message, code="unsupported_media_type")
        coding = headers.get(b"content-encoding", b"identity").strip().lower()
        if coding != b"identity":
            name = coding.decode() if coding in _CODINGS else "in the way that its Content-Encoding says"
            message = f"the body may not be encoded, got {name}: send it as it is"
            plain = {"accept-encoding": "identity"}
            raise RequestError(415, message, code="unsupported_content_encoding", headers=plain)
        with self.budget.lease() as lease:
            body = await self._read(receive, length, lease)
            if body is not None:  # else the client has disconnected
                await self.app(scope, _replay(body, receive), send)
        return None

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


class Heads(HttpMiddleware):
    """Serves HEAD as GET; uvicorn leaves out the body."""

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        head = scope["method"] == "HEAD"
        await self.app({**scope, "method": "GET"} if head else scope, receive, send)

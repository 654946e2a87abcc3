"""The middleware of the edge: what a request must be before a route sees it. It removes the proxy's part of the path,
checks headers, Host and API key, and reads the body within the limits of size, time and memory. It sets
`request.state.tenant`, the name of the client.
"""

import asyncio
import hashlib
import hmac
import ipaddress
import re
import secrets
from collections.abc import Iterable
from itertools import chain

from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from phase6_integration.api.application import HttpMiddleware, respond
from phase6_integration.api.errors import RequestError
from phase6_integration.api.parsing import BY_KEY
from phase6_integration.api.settings import ServerSettings
from phase6_integration.wings.edge.api_keys import ApiKeys, digest
from phase6_integration.wings.edge.memory_budget import Hold, MemoryBudget
from phase6_integration.wings.edge.not_served import check_served
from phase6_integration.wings.edge.origins import check_host, cors

BY_ADDRESS = "address-"  # ids of clients without an API key begin with it
PUBLIC = frozenset({"/", "/health", "/health/live", "/health/ready", "/ping", "/version"})  # routes without an API key
_ABSOLUTE = re.compile(r"^https?://[^/]*", re.IGNORECASE)  # a request may name the server before the path
_WITH_BODY = frozenset({"POST", "PUT", "PATCH"})
_CODINGS = frozenset({b"gzip", b"x-gzip", b"deflate", b"compress", b"x-compress", b"br", b"zstd"})
_CLOSE = {"connection": "close"}


def outer(settings: ServerSettings) -> list[Middleware]:
    return [Middleware(Paths, root=settings.root_path)]


def around(settings: ServerSettings) -> list[Middleware]:
    """Outside of the error responses, which need the headers of CORS; it answers some requests itself."""
    return [Middleware(HeaderLimits, settings=settings), *cors(settings)]


def inner(settings: ServerSettings, keys: ApiKeys | None = None) -> list[Middleware]:
    """Before the routes. `keys` replaces the API keys of the settings, and may change while the app runs."""
    return [
        Middleware(HeadChecks, settings=settings, keys=keys or ApiKeys(settings.api_keys)),
        Middleware(BodyLimits, settings=settings),
        Middleware(Heads),
    ]


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
        self.budget = MemoryBudget.for_bodies(settings.max_buffered_bytes)

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
        with self.budget.hold() as hold:
            body = await self._read(receive, length, hold)
            if body is not None:  # else the client has disconnected
                await self.app(scope, _replay(body, receive), send)
        return None

    async def _read(self, receive: Receive, length: bytes | None, hold: Hold) -> bytes | None:
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
                    hold.cover(size)
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

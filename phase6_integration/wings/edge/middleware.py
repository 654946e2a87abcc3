"""The middleware of the edge, three layers: what the head of a request must be, who may send it, and its body, read
within limits of size, time and memory. It sets `request.state.tenant`, the name of the client.
"""

import asyncio
import contextlib
import hashlib
import ipaddress
import re
import secrets
from collections.abc import Sequence
from itertools import chain

from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from phase6_integration.api.application import HttpMiddleware, respond
from phase6_integration.api.errors import RequestError
from phase6_integration.api.parsing import BY_KEY
from phase6_integration.api.settings import ServerSettings
from phase6_integration.wings.edge.api_keys import ApiKeys
from phase6_integration.wings.edge.memory_budget import BODIES, SMALL_BODY, Hold, MemoryBudget
from phase6_integration.wings.edge.origins import check_host, cors

BY_ADDRESS = "address-"  # ids of clients without an API key begin with it
PUBLIC = frozenset({"/", "/health", "/health/live", "/health/ready", "/ping", "/version"})  # routes without an API key
_ABSOLUTE = re.compile(r"^https?://[^/]*", re.IGNORECASE)  # a request may name the server before the path
_WITH_BODY = frozenset({"POST", "PUT", "PATCH"})
_CLOSE = {"connection": "close"}
_SECRET = secrets.token_bytes(16)


def around(settings: ServerSettings) -> list[Middleware]:
    """Outside of the error responses, which need the headers of CORS; that answers some requests itself."""
    return [Middleware(Heads, settings=settings), *cors(settings)]


def inner(settings: ServerSettings, keys: ApiKeys | None = None) -> list[Middleware]:
    """Before the routes. `keys` replaces the API keys of the settings, and may change while the app runs."""
    keys = keys or ApiKeys(settings.api_keys)
    return [Middleware(Access, settings=settings, keys=keys), Middleware(Bodies, settings=settings)]


class Heads(HttpMiddleware):
    """Limits the headers of a request, and serves HEAD as GET: uvicorn leaves out the body. Takes off the path what is
    before a route: scheme and host, which any client may send, and the path under which a proxy passes this server on,
    such as /llm. A proxy that has taken that off already may leave it out."""

    def __init__(self, app: ASGIApp, settings: ServerSettings) -> None:
        super().__init__(app)
        self.settings = settings

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            check_headers(scope["headers"], self.settings)
        except RequestError as error:
            return await respond(error, scope, receive, send)
        method = "GET" if scope["method"] == "HEAD" else scope["method"]
        path, root = _ABSOLUTE.sub("", scope["path"]) or "/", self.settings.root_path
        if root and f"{path}/".startswith(f"{root}/"):
            path = path.removeprefix(root) or "/"
        return await self.app({**scope, "method": method, "path": path}, receive, send)


def check_headers(headers: Sequence[tuple[bytes, bytes]], limits: ServerSettings) -> None:
    """Limit the number and the size of headers, and require one framing of the body. The one Host header that HTTP/1.1
    requires is checked by h11."""
    if len(headers) > limits.max_headers or sum(map(len, chain(*headers))) > limits.max_header_bytes:
        raise headers_too_large(limits)
    if {b"content-length", b"transfer-encoding"} <= {name for name, _ in headers}:
        wrong = "a body has a Content-Length or a Transfer-Encoding, not both: servers disagree where it ends"
        raise RequestError(400, wrong, code="bad_http", headers=_CLOSE)


def headers_too_large(limits: ServerSettings) -> RequestError:
    message = f"the headers are too large: at most {limits.max_headers} of {limits.max_header_bytes} bytes are read"
    return RequestError(431, message, code="headers_too_large", headers=_CLOSE)


class Access(HttpMiddleware):
    """Refuses a request for a wrong Host, and without a valid API key, unless the server has no keys or the route is
    public. Sets `request.state.tenant`: a hash of the key or, without one, of the network address. The hash has a new
    secret at every start of the server."""

    def __init__(self, app: ASGIApp, settings: ServerSettings, keys: ApiKeys) -> None:
        super().__init__(app)
        self.settings = settings
        self.keys = keys

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        check_host(scope["headers"], self.settings.allowed_hosts)
        key = self.keys.find(scope["headers"])
        if key is None and self.keys.digests and scope["path"] not in PUBLIC:
            message = "a valid API key is needed: send it as `Authorization: Bearer <key>`"
            raise RequestError(401, message, code="invalid_api_key", headers={"www-authenticate": "Bearer"})
        kind, client = (BY_ADDRESS, _network(scope)) if key is None else (BY_KEY, key)
        scope["state"]["tenant"] = kind + hashlib.blake2b(client, key=_SECRET, digest_size=8).hexdigest()
        await self.app(scope, receive, send)


def _network(scope: Scope) -> bytes:
    """The client's IPv4 address, or the first half of its IPv6 address: one client has all addresses of a /64."""
    host = (scope.get("client") or ("",))[0]
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return str(host).encode()
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).packed[:8]


class Bodies(HttpMiddleware):
    """Reads the whole body before any route runs: JSON, not encoded, within the limits of size and time."""

    def __init__(self, app: ASGIApp, settings: ServerSettings) -> None:
        super().__init__(app)
        self.settings = settings
        self.budget = MemoryBudget(settings.max_buffered_bytes // BODIES, SMALL_BODY)

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = dict(scope["headers"])
        length = headers.get(b"content-length")
        if b"transfer-encoding" not in headers and length in (None, b"0"):
            return await self.app(scope, receive, send)
        if scope["method"] in _WITH_BODY and not _is_json(headers.get(b"content-type", b"")):
            message = "the body must be JSON: send it with `Content-Type: application/json`"
            raise RequestError(415, message, code="unsupported_media_type")
        if headers.get(b"content-encoding", b"identity").strip().lower() != b"identity":
            message, plain = "the body may not be encoded: send it as it is", {"accept-encoding": "identity"}
            raise RequestError(415, message, code="unsupported_content_encoding", headers=plain)
        if length is not None and (not length.isdigit() or int(length) > self.settings.max_body_bytes):
            raise self._too_large()
        with self.budget.hold() as hold, contextlib.suppress(ClientDisconnect):
            body = await self._read(Request(scope, receive), hold)
            await self.app(scope, _replay(body, receive), send)
        return None

    async def _read(self, request: Request, hold: Hold) -> bytes:
        parts, size, seconds = list[bytes](), 0, self.settings.receive_timeout
        try:
            async with asyncio.timeout(seconds):
                async for part in request.stream():
                    parts.append(part)
                    size += len(part)
                    if size > self.settings.max_body_bytes:
                        raise self._too_large()
                    hold.cover(size)
        except TimeoutError:
            late = f"the body did not arrive within {seconds:g} seconds"
            raise RequestError(408, late, code="body_timeout", headers=_CLOSE) from None
        return b"".join(parts)

    def _too_large(self) -> RequestError:
        message = f"the body is too large: at most {self.settings.max_body_bytes} bytes are read"
        return RequestError(413, message, code="body_too_large")


def _is_json(content_type: bytes) -> bool:
    kind = content_type.split(b";", 1)[0].strip().lower()
    return kind == b"application/json" or (kind.startswith(b"application/") and kind.endswith(b"+json"))


def _replay(body: bytes, receive: Receive) -> Receive:
    """A `receive` that yields the body first."""
    first: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replayed() -> Message:
        return first.pop() if first else await receive()

    return replayed

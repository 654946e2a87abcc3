"""Edge: the layer in front of every route. It checks a request's head and API key, and reads its body within limits
of size, time and memory."""

import asyncio
import contextlib
import hashlib
import ipaddress
import re
import secrets
from collections.abc import Sequence
from itertools import chain

from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from phase6_integration.api.application import HttpMiddleware
from phase6_integration.api.errors import RequestError, respond
from phase6_integration.api.parsing import BY_KEY
from phase6_integration.api.settings import ServerSettings
from phase6_integration.extras.edge.api_keys import ApiKeys
from phase6_integration.extras.edge.edge_settings import EdgeSettings
from phase6_integration.extras.edge.memory_budget import BODIES, SMALL_BODY, Hold, MemoryBudget
from phase6_integration.extras.edge.origins import check_host

BY_ADDRESS = "address-"  # ids of clients without an API key begin with it
# Routes without an API key.
PUBLIC = frozenset({"/", "/health", "/health/", "/health/live", "/health/ready", "/ping", "/version"})
PAGE = "/static/"  # its scripts and styles: neither do they need one
_ABSOLUTE = re.compile(r"^https?://[^/]*", re.IGNORECASE)  # a request may name the server before the path
_WITH_BODY = frozenset({"POST", "PUT", "PATCH"})
_CLOSE = {"connection": "close"}
_SECRET = secrets.token_bytes(16)


def layer(settings: ServerSettings) -> Middleware:
    return Middleware(Edge, settings=settings)


class Edge(HttpMiddleware):
    """Sets `request.state.client`, the name of the client: a hash of its key, or of its network address if it has
    none, with a new secret at every start of the server. Pages of allowed origins get CORS headers, on errors too;
    their keys are in a header, so cookies are not needed."""

    def __init__(self, app: ASGIApp, settings: ServerSettings) -> None:
        super().__init__(app)
        self.settings, self.edge = settings, settings.of(EdgeSettings)
        self.keys = ApiKeys(self.edge.api_keys)
        self.bodies = MemoryBudget(self.edge.max_buffered_bytes // BODIES, SMALL_BODY)
        self.checked: ASGIApp = self._answer
        if self.edge.allowed_origins:
            self.checked = CORSMiddleware(
                self._answer,
                allow_origins=self.edge.allowed_origins,
                allow_methods=("GET", "POST"),
                allow_headers=("*",),
                expose_headers=("x-request-id", "request-id", "retry-after", "warning"),
            )

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves HEAD as GET, since uvicorn omits the body. Removes everything before the route from the path:
        scheme and host, which any client may send, and a proxy's prefix such as /llm. A proxy may also remove its
        prefix itself."""
        head = scope["method"] == "HEAD"
        path, root = _ABSOLUTE.sub("", scope["path"]) or "/", self.settings.root_path
        if root and f"{path}/".startswith(f"{root}/"):
            path = path.removeprefix(root) or "/"
        try:
            check_headers(scope["headers"], self.edge)
        except RequestError as error:
            response = await respond(Request(scope), error)
            return await response(scope, receive, send)
        return await self.checked(
            {**scope, "method": "GET" if head else scope["method"], "head": head, "path": path}, receive, send
        )

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self.bodies.hold() as hold, contextlib.suppress(ClientDisconnect):
            try:
                check_host(scope["headers"], self.settings.allowed_hosts)
                scope["state"]["client"] = self._tenant(scope)
                if not _is_public(scope["path"]) and self._has_body(scope):
                    receive = _replay(await self._read(Request(scope, receive), hold), receive)
            except RequestError as error:
                response = await respond(Request(scope), error)
                return await response(scope, receive, send)
            return await self.app(scope, receive, send)

    def _tenant(self, scope: Scope) -> str:
        """The name of the client. A RequestError without a valid API key, unless there are no keys or the route is
        public."""
        key = self.keys.find(scope["headers"])
        if key is None and self.keys.digests and not _is_public(scope["path"]):
            message = "a valid API key is needed: send it as `Authorization: Bearer <key>`"
            raise RequestError(401, message, code="invalid_api_key", headers={"www-authenticate": "Bearer"})
        kind, client = (BY_ADDRESS, _network(scope)) if key is None else (BY_KEY, key)
        return kind + hashlib.blake2b(client, key=_SECRET, digest_size=8).hexdigest()

    def _has_body(self, scope: Scope) -> bool:
        """Whether a body follows. A RequestError if it is not JSON, is encoded, or is too large."""
        headers = dict(scope["headers"])
        length = headers.get(b"content-length")
        if b"transfer-encoding" not in headers and length in (None, b"0"):
            return False
        if scope["method"] in _WITH_BODY and not _is_json(headers.get(b"content-type", b"")):
            message = "the body must be JSON: send it with `Content-Type: application/json`"
            raise RequestError(415, message, code="unsupported_media_type")
        if headers.get(b"content-encoding", b"identity").strip().lower() != b"identity":
            message, plain = "the body may not be encoded: send it as it is", {"accept-encoding": "identity"}
            raise RequestError(415, message, code="unsupported_content_encoding", headers=plain)
        if length is not None and (not length.isdigit() or int(length) > self.settings.max_body_bytes):
            raise self._too_large()
        return True

    async def _read(self, request: Request, hold: Hold) -> bytes:
        parts, size, seconds = list[bytes](), 0, self.edge.receive_timeout
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


def check_headers(headers: Sequence[tuple[bytes, bytes]], limits: EdgeSettings) -> None:
    """Limit the number and size of headers, and require a single framing of the body. h11 checks the one Host header
    that HTTP/1.1 requires."""
    if len(headers) > limits.max_headers or sum(map(len, chain(*headers))) > limits.max_header_bytes:
        raise headers_too_large(limits)
    if {b"content-length", b"transfer-encoding"} <= {name for name, _ in headers}:
        wrong = "a body has a Content-Length or a Transfer-Encoding, not both: servers disagree where it ends"
        raise RequestError(400, wrong, code="bad_http", headers=_CLOSE)


def headers_too_large(limits: EdgeSettings) -> RequestError:
    message = f"the headers are too large: at most {limits.max_headers} of {limits.max_header_bytes} bytes are read"
    return RequestError(431, message, code="headers_too_large", headers=_CLOSE)


def _is_public(path: str) -> bool:
    """Whether a route needs no API key. No such route has a body, so none is read and it takes no memory from other
    requests."""
    return path in PUBLIC or path.startswith(PAGE)


def _network(scope: Scope) -> bytes:
    """The client's IPv4 address, or the first half of its IPv6 address, since a single client owns a /64."""
    host = (scope.get("client") or ("",))[0]
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return str(host).encode()
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).packed[:8]


def _is_json(content_type: bytes) -> bool:
    kind = content_type.split(b";", 1)[0].strip().lower()
    return kind == b"application/json" or (kind.startswith(b"application/") and kind.endswith(b"+json"))


def _replay(body: bytes, receive: Receive) -> Receive:
    """A `receive` that yields the body first."""
    first: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replayed() -> Message:
        return first.pop() if first else await receive()

    return replayed

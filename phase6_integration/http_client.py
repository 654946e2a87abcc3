"""Connections to one server, kept alive and used again: as much of HTTP/1.1 as commands and load generators need."""

import asyncio
import os
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, cast
from urllib.parse import urlsplit

import httptools
import msgspec


class UnreachableError(OSError):
    """No connection to the server can be made."""


class LostError(OSError):
    """The connection went away before the response was whole. `begun`: some of it had come."""

    def __init__(self, begun: bool, why: str = "") -> None:
        super().__init__(why or "the connection was lost" + (" in the middle of the answer" if begun else ""))
        self.begun = begun


class RefusedError(RuntimeError):
    """The server is there, and will not do what the command needs."""


@dataclass(frozen=True, slots=True)
class Target:
    """Where the server is, and what every request to it carries."""

    host: str
    port: int
    tls: bool
    prefix: str  # of every path
    api_key: str | None = None

    @classmethod
    def of(cls, url: str, api_key: str | None = None) -> "Target":
        """From a URL such as http://127.0.0.1:8000, with or without the /v1 that clients write after it."""
        parts = urlsplit(url)
        try:
            port = parts.port
        except ValueError:
            port = 0
        if parts.scheme not in ("http", "https") or not parts.hostname or port == 0 or parts.query or parts.fragment:
            raise ValueError(f"a server's URL is such as http://127.0.0.1:8000, got {url!r}")
        if api_key is not None and not (api_key.isascii() and api_key.isprintable()):
            raise ValueError("an API key is printable ASCII")
        prefix = parts.path.rstrip("/").removesuffix("/v1")
        tls = parts.scheme == "https"
        return cls(parts.hostname, port or (443 if tls else 80), tls, prefix, api_key)

    @property
    def origin(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'https' if self.tls else 'http'}://{host}:{self.port}{self.prefix}"

    def request(self, method: str, path: str, body: bytes = b"") -> bytes:
        """A whole request, ready to be written."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        lines = [f"{method} {self.prefix}{path} HTTP/1.1", f"host: {host}:{self.port}", "accept: */*"]
        if self.api_key is not None:
            lines.append(f"authorization: Bearer {self.api_key}")
        if body:
            lines += ["content-type: application/json", f"content-length: {len(body)}"]
        return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


class Answer(Protocol):
    """What a response is handed to: its status first, then the body as it comes, with the moment it came."""

    status: int

    def feed(self, data: bytes, now: float) -> None: ...


class Connection(asyncio.Protocol):
    """One exchange after the other."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.open = False
        self._clock = clock
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._answer: Answer | None = None
        self._over: asyncio.Future[None] | None = None
        self._begun = False
        self._now = 0.0

    async def exchange(self, request: bytes, answer: Answer) -> None:
        """Until the response is whole. LostError if it will never be. Cancelled, the connection is closed."""
        assert self._transport is not None
        self._answer, self._begun = answer, False
        self._over = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        try:
            await self._over
        except BaseException:
            self.close()
            raise
        finally:
            self._answer = self._over = None

    def close(self) -> None:
        self.open = False
        if self._transport is not None:
            self._transport.abort()

    # What asyncio calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport, self.open = cast(asyncio.Transport, transport), True

    def data_received(self, data: bytes) -> None:
        if self._over is None:  # nobody asked: the server says goodbye
            self.close()
            return
        self._begun = True
        self._now = self._clock()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._end(LostError(True, f"what came is no HTTP response: {error}"))

    def connection_lost(self, error: Exception | None) -> None:
        self.open = False
        self._end(LostError(self._begun))

    # What httptools calls.

    def on_headers_complete(self) -> None:
        if self._answer is not None:
            self._answer.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        if self._answer is not None:
            self._answer.feed(body, self._now)

    def on_message_complete(self) -> None:
        if not self._parser.should_keep_alive():
            self.open = False
        self._end(None)

    def _end(self, error: Exception | None) -> None:
        if self._over is None or self._over.done():
            return
        if error is None:
            self._over.set_result(None)
        else:
            self._over.set_exception(error)


class Pool:
    """As many connections as are needed at once. The one used last is used next."""

    def __init__(self, target: Target, clock: Callable[[], float]) -> None:
        self.target = target
        self.opened = 0
        self._clock = clock
        self._idle: list[Connection] = []
        self._tls = ssl.create_default_context() if target.tls else None

    async def reach(self) -> None:
        """Open the first connection. UnreachableError if there is no server."""
        self._keep(await self._connect())

    async def exchange(self, request: bytes, answer: Answer) -> None:
        """UnreachableError if there is no server, LostError if the connection went away."""
        while self._idle:
            connection = self._idle.pop()
            if not connection.open:
                continue
            try:
                await connection.exchange(request, answer)
            except LostError as lost:
                if lost.begun:
                    raise
                continue  # a server may close what lies idle at any moment, also at this one: it has read nothing
            self._keep(connection)
            return
        connection = await self._connect()
        await connection.exchange(request, answer)
        self._keep(connection)

    def close(self) -> None:
        for connection in self._idle:
            connection.close()
        self._idle.clear()

    def _keep(self, connection: Connection) -> None:
        if connection.open:
            self._idle.append(connection)
        else:
            connection.close()

    async def _connect(self) -> Connection:
        loop, target = asyncio.get_running_loop(), self.target
        try:
            _, connection = await loop.create_connection(
                lambda: Connection(self._clock), target.host, target.port, ssl=self._tls
            )
        except OSError as error:
            why = os.strerror(error.errno) if error.errno and error.errno > 0 else str(error)
            raise UnreachableError(f"no server answers at {target.origin} ({why}); is it running?") from None
        self.opened += 1
        return connection


class Whole:
    """A response's body."""

    def __init__(self) -> None:
        self.status = 0
        self.body = b""

    def feed(self, data: bytes, now: float) -> None:
        self.body += data


class _Model(msgspec.Struct):
    id: str


class _Error(msgspec.Struct):
    message: str = "no reason given"


class _Models(msgspec.Struct):
    data: list[_Model] = msgspec.field(default_factory=list)
    error: _Error = msgspec.field(default_factory=_Error)


async def first_model(pool: Pool) -> str:
    """What the server calls its model."""
    answer = Whole()
    await pool.exchange(pool.target.request("GET", "/v1/models"), answer)
    try:
        models = msgspec.json.decode(answer.body, type=_Models)
    except msgspec.DecodeError:
        models = _Models()
    if answer.status != 200:
        raise RefusedError(f"{pool.target.origin} answered {answer.status}: {models.error.message}")
    if not models.data:
        raise RefusedError(f"{pool.target.origin} names no model at /v1/models; name one yourself")
    return models.data[0].id

"""HTTP/1.1 connections for the load generator, kept alive and reused.

The generator shares the machine with the server that it measures, so a request must cost it little: a connection is an
asyncio protocol over httptools, and gives each piece of a body to its Response with the moment of its arrival.
"""

import asyncio
import os
import ssl
from collections.abc import Callable
from typing import cast
from urllib.parse import urlsplit

import httptools

from phase6_integration.load.response import Response


class UnreachableError(OSError):
    """No connection to the server can be made."""


class ConnectionLostError(OSError):
    """The connection ended before the response did. `begun`: a part of the response had arrived."""

    def __init__(self, begun: bool, why: str = "") -> None:
        super().__init__(why or "the connection was lost" + (" in the middle of the answer" if begun else ""))
        self.begun = begun


class Connection(asyncio.Protocol):
    """Exchanges, one after the other."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.open = False
        self._clock = clock
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._response: Response | None = None
        self._done: asyncio.Future[None] | None = None
        self._begun = False
        self._now = 0.0

    async def exchange(self, request: bytes, response: Response) -> None:
        """Send a request and wait for the end of its response. Cancelling closes the connection."""
        assert self._transport is not None
        self._response, self._begun = response, False
        self._done = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        try:
            await self._done
        except BaseException:
            self.close()
            raise
        finally:
            self._response = self._done = None

    def close(self) -> None:
        self.open = False
        if self._transport is not None:
            self._transport.abort()

    # Called by asyncio.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport, self.open = cast(asyncio.Transport, transport), True

    def data_received(self, data: bytes) -> None:
        if self._done is None:  # unasked data on an idle connection
            self.close()
            return
        self._begun = True
        self._now = self._clock()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._end(ConnectionLostError(True, f"what came is no HTTP response: {error}"))

    def connection_lost(self, error: Exception | None) -> None:
        self.open = False
        self._end(ConnectionLostError(self._begun))

    # Called by httptools.

    def on_headers_complete(self) -> None:
        if self._response is not None:
            self._response.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        if self._response is not None:
            self._response.feed(body, self._now)

    def on_message_complete(self) -> None:
        if not self._parser.should_keep_alive():
            self.open = False
        self._end(None)

    def _end(self, error: Exception | None) -> None:
        if self._done is None or self._done.done():
            return
        if error is None:
            self._done.set_result(None)
        else:
            self._done.set_exception(error)


class Pool:
    """Connections to one server, as many as are in use at once. The most recently used is reused first."""

    def __init__(
        self, url: str, api_key: str | None, clock: Callable[[], float], tls: ssl.SSLContext | None = None
    ) -> None:
        parts = urlsplit(url)
        https = parts.scheme == "https"
        self.url = url
        self.opened = 0
        self._host, self._port = parts.hostname or "", parts.port or (443 if https else 80)
        self._tls = (tls or ssl.create_default_context()) if https else None
        self._path = parts.path
        self._headers = f"host: {parts.netloc}\r\naccept: */*\r\n"
        if api_key is not None:
            self._headers += f"authorization: Bearer {api_key}\r\n"
        self._clock = clock
        self._idle: list[Connection] = []

    def request(self, method: str, path: str, body: bytes = b"") -> bytes:
        """The bytes of a request."""
        head = f"{method} {self._path}{path} HTTP/1.1\r\n{self._headers}"
        if body:
            head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n"
        return f"{head}\r\n".encode() + body

    async def exchange(self, request: bytes, response: Response) -> None:
        """Send a request and wait for the end of its response."""
        while self._idle:
            connection = self._idle.pop()
            if not connection.open:
                continue
            try:
                await connection.exchange(request, response)
            except ConnectionLostError as lost:
                if lost.begun:
                    raise
                continue  # the server closed an idle connection just now, and has not read the request
            self._keep(connection)
            return
        connection = await self._connect()
        await connection.exchange(request, response)
        self._keep(connection)

    async def close(self) -> None:
        for connection in self._idle:
            connection.close()
        self._idle.clear()
        await asyncio.sleep(0)  # the event loop closes them in its next turn

    def _keep(self, connection: Connection) -> None:
        if connection.open:
            self._idle.append(connection)
        else:
            connection.close()

    async def _connect(self) -> Connection:
        loop = asyncio.get_running_loop()
        try:
            _, connection = await loop.create_connection(
                lambda: Connection(self._clock), self._host, self._port, ssl=self._tls
            )
        except OSError as error:
            why = os.strerror(error.errno) if error.errno and error.errno > 0 else str(error)
            raise UnreachableError(f"no server answers at {self.url} ({why}); is it running?") from None
        self.opened += 1
        return connection

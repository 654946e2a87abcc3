"""Connection: one client's line, with the limits that uvicorn leaves to others.

uvicorn reads a request's head without a limit of size or time, and waits for ever for a client to read its response.
Here a head has so many bytes and seconds, a client that reads nothing is cut off, and even what is refused below the
application gets an error in the one shape, with a request id.

A client that ends its side of the line has left. It might only have no more to ask and still read; but that looks the
same as a client that is gone, and to tell them apart one would go on computing what perhaps nobody reads.
"""

import asyncio
import logging
import socket
import struct
from typing import Any, cast

from httptools import HttpRequestParser
from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from phase6_integration.server.errors import RequestError
from phase6_integration.server.limits import headers_too_large
from phase6_integration.server.offers import OfferlessParser
from phase6_integration.server.request_ids import HEADER, request_id
from phase6_integration.server.settings import ServerSettings
from phase6_integration.server.unframed import unframed

logger = logging.getLogger("nanoserve")

NO_LINGER = struct.pack("ii", 1, 0)


class Connection(HttpToolsProtocol):
    """Made for a server's settings by `connections`."""

    settings: ServerSettings
    _coming: asyncio.TimerHandle | None = None  # ends a request that does not arrive
    _stalled: asyncio.TimerHandle | None = None  # ends a client that does not read
    _active: RequestResponseCycle | None = None  # the request that is being answered
    _head = 0  # bytes of a head that is not complete yet; -1: what comes is a body
    _trailing = 0  # bytes since the last of a body that are none of it: the frames of chunks, and trailers
    _unread = 0  # bytes that the client had left unread when last looked at

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self.parser = cast(HttpRequestParser, OfferlessParser(self))

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(cast(asyncio.Transport, transport))
        self.transport.set_write_buffer_limits(high=0)  # writing pauses at the first byte that the client leaves unread
        self._expect()

    def connection_lost(self, exc: Exception | None) -> None:
        self._settle()
        self._unset_keepalive_if_required()  # uvicorn would not, if the client has reset the line
        self.resume_writing()
        self._tell_lost()
        cast(OfferlessParser, self.parser).close()
        super().connection_lost(exc)
        self.pipeline.clear()  # nobody waits for those any more
        self.cycle = None  # type: ignore[assignment]

    # The head.

    def data_received(self, data: bytes) -> None:
        if self._head >= 0:
            self._head += len(data)
        else:
            self._trailing += len(data)
        super().data_received(data)
        if self.transport.is_closing():
            return
        if max(self._head, self._trailing) > self.settings.max_header_bytes:
            self._refuse(headers_too_large(self.settings))
        elif self._coming is None and not self._busy:
            self._expect()  # line ends between two requests: uvicorn takes them for a request, and waits for its rest

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._head = max(self._head, 1)  # bytes that came together with the end of another message are not counted
        self._expect()

    def on_headers_complete(self) -> None:
        self._head = -1  # what follows is the body, and whoever reads that counts it
        super().on_headers_complete()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._head >= 0:  # a trailer is for nobody here, and would be added to the head
            super().on_header(name, value)

    def on_body(self, body: bytes) -> None:
        self._trailing = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._head = self._trailing = 0
        self._settle()
        super().on_message_complete()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._active = cycle
        super()._start_asgi_task(cycle, unframed(app, cycle) if cycle.scope["http_version"] == "1.0" else app)

    def _tell_lost(self) -> None:
        """uvicorn tells the newest request that its client has left; the one being answered may be an older one."""
        if self._active is not None and self._busy:
            self._active.disconnected = True
            self._active.message_event.set()

    def send_400_response(self, msg: str) -> None:
        """What could not be parsed."""
        self._refuse(RequestError(400, "this is not a valid HTTP request", code="bad_http"))

    def _expect(self) -> None:
        self._settle()
        self._coming = self.loop.call_later(self.settings.receive_timeout, self._too_slow)

    def _settle(self) -> None:
        if self._coming is not None:
            self._coming.cancel()
            self._coming = None

    def _too_slow(self) -> None:
        self._coming = None
        if self._head > 0:
            message = f"the request did not arrive within {self.settings.receive_timeout:g} seconds"
            self._refuse(RequestError(408, message, code="request_timeout"))
        elif not self._busy:
            self.transport.close()  # it has said nothing at all, or goes on sending what was refused long ago
        # Otherwise it is the body that is slow: BodyLimits answers, at the same limit.

    @property
    def _busy(self) -> bool:
        """Whether a response is on its way."""
        return self._active is not None and not self._active.response_complete

    def _refuse(self, error: RequestError) -> None:
        name = request_id(self.headers or ())
        fields = {"id": name, "status": error.status}
        logger.info("refused before it was a request: %s", error.message, extra={"fields": fields})
        if self.pipeline or (self._active is not None and self._busy and self._active.response_started):
            return self._drop()  # what is written now would land in the middle of an answer to another request
        head = {b"content-type": b"application/json", b"content-length": str(len(error.content)).encode()}
        head |= {HEADER: name.encode(), b"connection": b"close"}
        lines = b"".join(b"%s: %s\r\n" % pair for pair in head.items())
        self.transport.write(STATUS_LINE[error.status] + lines + b"\r\n" + error.content)
        return self.transport.close()

    # The response.

    def pause_writing(self) -> None:
        super().pause_writing()
        self._await_reader()

    def resume_writing(self) -> None:
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None
        super().resume_writing()

    def _await_reader(self) -> None:
        self._unread = self.transport.get_write_buffer_size()
        self._stalled = self.loop.call_later(self.settings.send_timeout, self._cut)

    def _cut(self) -> None:
        if self.transport.get_write_buffer_size() < self._unread:
            return self._await_reader()  # it reads, if slowly
        logger.info("a client read nothing for %g seconds: it is cut off", self.settings.send_timeout)
        return self._drop()

    def _drop(self) -> None:
        """Close and send nothing more: what is left, the kernel would keep for a client that never reads."""
        self._tell_lost()  # now: uvloop wakes who waits to write before it says so itself
        self.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, NO_LINGER)
        self.transport.abort()


def connections(settings: ServerSettings) -> type[Connection]:
    """The kind of connection that these settings ask for, as uvicorn wants it: a class."""
    return type("BoundConnection", (Connection,), {"settings": settings})

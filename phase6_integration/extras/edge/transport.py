"""Transport: the connections of clients, which uvicorn's protocol parses with h11.

uvicorn reads the head of a request without a time limit, and waits forever for a client that does not read. Here both
have limits. A request refused below the application gets an error in OpenAI's format, with a request id. A client that
closes its sending side counts as disconnected, since that looks the same as a client that is gone.
"""

import asyncio
import logging
import math
import socket
import struct
import sys
from collections.abc import Mapping
from functools import partial
from http import HTTPStatus
from typing import Any, cast

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from phase6_integration.api.application import REQUEST_ID, request_id
from phase6_integration.api.errors import RequestError, overloaded
from phase6_integration.api.settings import ServerSettings
from phase6_integration.extras.edge.edge_settings import EdgeSettings
from phase6_integration.extras.edge.middleware import headers_too_large

logger = logging.getLogger("nanoserve")

NO_LINGER = struct.pack("ii", 1, 0)
UNSENT = 1 << 16  # bytes that the kernel takes before they can be sent: of megabytes it would not say that they move
LEAST_READ = 4096  # bytes that must leave in `send_timeout`, unless all do


def transport(settings: ServerSettings, max_connections: float = math.inf) -> Mapping[str, Any]:
    """Options of uvicorn, for this module's connections."""
    edge = settings.of(EdgeSettings)
    connection = cast(type[asyncio.Protocol], partial(ServerConnection, edge, max_connections))
    return {"http": connection, "h11_max_incomplete_event_size": edge.max_header_bytes}


class ServerConnection(H11Protocol):
    """One connection, which is closed when it exceeds a limit."""

    def __init__(self, settings: EdgeSettings, max_connections: float, **given: Any) -> None:
        super().__init__(**given)
        self.settings = settings
        self.max_connections = max_connections
        self._arrival: asyncio.TimerHandle | None = None  # ends a request that arrives too slowly
        self._stalled: asyncio.TimerHandle | None = None  # closes the connection of a client that does not read

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        # Writing pauses as soon as the socket is full: over TLS at once, while the handshake's last bytes are unsent.
        # With high=0 a TLS transport would pause with nothing to send.
        transport.set_write_buffer_limits(high=1, low=0)
        connection = transport.get_extra_info("socket")
        if connection.family != socket.AF_UNIX and hasattr(socket, "TCP_NOTSENT_LOWAT"):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT)
        self._limit_arrival()
        if len(self.connections) > self.max_connections:
            logger.warning("more connections than %g are open: one is refused", self.max_connections)
            headers = {"retry-after": "5"}
            self._respond(RequestError(503, "too many connections are open", code="overloaded", headers=headers))

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in filter(None, (self._arrival, self._stalled)):
            timer.cancel()
        super().connection_lost(None)  # uvicorn would keep its timer after a connection reset

    # The request.

    def data_received(self, data: bytes) -> None:
        before = self.conn.their_state
        if self.transport.is_closing() or before is h11.MUST_CLOSE:
            return  # this comes after the last request, which may still be answered
        if before in (h11.IDLE, h11.DONE) and not self.conn.trailing_data[0]:
            data = data.lstrip(b"\r\n")  # empty lines between requests, which some clients send after a body
        try:
            if data:
                super().data_received(data)
        except Exception as error:
            logger.error("reading a request failed", exc_info=error)
            fault = RequestError(500, "the server failed on this request; its log says why", code="internal_error")
            self._refuse(overloaded() if isinstance(error, MemoryError) else fault)
        if self._arrival is not None and self.conn.their_state is not before:
            self._arrival.cancel()
            self._arrival = None
        if self.conn.their_state in (h11.IDLE, h11.SEND_BODY):
            self._limit_arrival()

    def _limit_arrival(self) -> None:
        if self._arrival is None and not self.transport.is_closing():
            self._arrival = self.loop.call_later(self.settings.receive_timeout, self._too_slow)

    def _too_slow(self) -> None:
        self._arrival = None
        begun, _ = self.conn.trailing_data
        if begun and self.conn.their_state is h11.IDLE:
            message = f"the request did not arrive within {self.settings.receive_timeout:g} seconds"
            self._refuse(RequestError(408, message, code="request_timeout"))
        elif self.conn.our_state not in (h11.SEND_RESPONSE, h11.SEND_BODY):
            self.transport.close()  # it has sent nothing, or still sends a body that was refused
        # Otherwise the body is slow: the middleware that reads it answers, with the same limit.

    def send_400_response(self, msg: str) -> None:
        """Refuse data that is not HTTP. uvicorn calls this while it handles h11's error."""
        error = sys.exception()
        assert isinstance(error, h11.ProtocolError)
        large = error.error_status_hint == HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE
        malformed = RequestError(400, "this is not a valid HTTP request", code="bad_http")
        self._refuse(headers_too_large(self.settings) if large else malformed)

    def _refuse(self, error: RequestError) -> None:
        """Log an error and send it instead of a response."""
        name = request_id(self.headers if self.conn.our_state is h11.SEND_RESPONSE else ())
        fields = {"id": name, "status": error.status}
        logger.info("refused before it was a request: %s", error.message, extra={"fields": fields})
        self._respond(error, name)

    def _respond(self, error: RequestError, name: str = "") -> None:
        """Send an error instead of a response, and close the connection."""
        answering = self.conn.our_state is h11.SEND_RESPONSE
        if answering:  # its application must not answer any more
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self.conn.our_state is h11.SEND_BODY:
            return self._drop()  # an error would end up in the middle of another response
        if answering or self.conn.our_state is h11.IDLE:  # else the response has been sent: there is no second one
            head = {"content-type": "application/json", "content-length": str(len(error.content))}
            head |= {**(error.headers or {}), REQUEST_ID.decode(): name or request_id(()), "connection": "close"}
            lines = "".join(f"{key}: {value}\r\n" for key, value in head.items())
            status = f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}\r\n"
            self.transport.write(f"{status}{lines}\r\n".encode() + error.content)
        return self.transport.close()

    # The response.

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_reader()

    def resume_writing(self) -> None:
        if self._stalled is not None:
            self._stalled.cancel()
        if not self.transport.is_closing():  # uvloop wakes a waiting writer before it reports the loss
            super().resume_writing()

    def _watch_reader(self) -> None:
        unread = self.transport.get_write_buffer_size()
        self._stalled = self.loop.call_later(self.settings.send_timeout, self._close_stalled, unread)

    def _close_stalled(self, unread: int) -> None:
        if self.transport.get_write_buffer_size() <= unread - LEAST_READ:
            return self._watch_reader()  # it reads, but slowly
        logger.info("a client left sent data unread for %g seconds: it is cut off", self.settings.send_timeout)
        return self._drop()

    def _drop(self) -> None:
        """Close at once. Without SO_LINGER 0 the kernel would keep the unread bytes."""
        self.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, NO_LINGER)
        self.transport.abort()

"""Transport: one connection of a client, between the socket and uvicorn's own HTTP protocol.

uvicorn reads the head of a request without a limit of time, and waits for ever for a client that does not read. Here
both are limited, and a request that is refused below the application gets an error in OpenAI's format, with a request
id. A client that closes its sending side counts as disconnected: that looks the same as a client that is gone.
"""

import asyncio
import logging
import socket
import struct
import sys
import weakref
from http import HTTPStatus
from typing import Any, cast

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from phase6_integration.api.application import REQUEST_ID, request_id
from phase6_integration.api.errors import RequestError, overloaded
from phase6_integration.api.settings import ServerSettings
from phase6_integration.wings.edge.middleware import headers_too_large

if sys.platform != "win32":
    import resource

logger = logging.getLogger("nanoserve")

NO_LINGER = struct.pack("ii", 1, 0)
SPARE_DESCRIPTORS = 32  # kept for the engine, files and responses; at the limit itself the kernel's answer is silence
SHED_PERIOD = 10.0  # seconds


def transport_config(app: ASGIApp, settings: ServerSettings, **options: Any) -> uvicorn.Config:
    """Configure uvicorn to parse HTTP with h11, behind a Connection for each socket."""
    shed = Shed()

    def connection(**given: Any) -> Connection:
        return Connection(settings, shed, H11Protocol(**given))

    return uvicorn.Config(
        app,
        http=cast(type[asyncio.Protocol], connection),
        h11_max_incomplete_event_size=settings.max_header_bytes,
        timeout_keep_alive=round(settings.idle_timeout),
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        **options,
    )


class Connection(asyncio.Protocol):
    """One connection: passes what happens to it on to uvicorn's protocol, and ends it where a limit is exceeded."""

    def __init__(self, settings: ServerSettings, shed: "Shed", http: H11Protocol) -> None:
        self.settings = settings
        self.shed = shed
        self.http = http
        self.loop = http.loop
        self.transport: asyncio.Transport
        self._arrival: asyncio.TimerHandle | None = None  # ends a request that arrives too slowly
        self._stalled: asyncio.TimerHandle | None = None  # closes the connection of a client that does not read
        self._unread = 0  # bytes in the write buffer at the last check

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.http.connection_made(cast(asyncio.Transport, _Writer(self)))
        # Writing pauses as soon as the socket is full: over TLS at once, while the handshake's last bytes are unsent.
        # With high=0 a TLS transport would pause with nothing to send.
        self.transport.set_write_buffer_limits(high=1, low=0)
        self._arrival = self.loop.call_later(self.settings.receive_timeout, self._too_slow)
        if _descriptors_run_out(transport.get_extra_info("socket").fileno()):
            self.refuse(self.shed.another(self.loop.time()), logging.DEBUG)

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_timers()
        self.http.connection_lost(None)  # uvicorn would keep its timer after a connection reset

    # The request.

    def data_received(self, data: bytes) -> None:
        conn = self.http.conn
        before = conn.their_state
        if self.transport.is_closing() or before is h11.MUST_CLOSE:
            return None  # it comes after the last request, which may still be answered
        if before in (h11.IDLE, h11.DONE) and not conn.trailing_data[0]:
            data = data.lstrip(b"\r\n")  # empty lines between requests, which some clients send after a body
        try:
            if data:
                self.http.data_received(data)
        except h11.LocalProtocolError as error:
            self.invalid(error)  # uvicorn cannot answer it: the rest of a body that was refused is malformed
        except Exception as error:
            logger.error("reading a request failed", exc_info=error)
            fault = RequestError(500, "the server failed on this request; its log says why", code="internal_error")
            self.refuse(overloaded() if isinstance(error, MemoryError) else fault)
        if self.transport.is_closing():
            return self.http.connection_lost(None)  # its application must not answer any more
        if conn.their_state is not before:
            self._cancel_arrival()
        if self._arrival is None and conn.their_state in (h11.IDLE, h11.SEND_BODY):
            self._arrival = self.loop.call_later(self.settings.receive_timeout, self._too_slow)
        if conn.their_state is h11.SEND_BODY:  # uvloop would hand over all that has come, before any other connection
            self.transport.pause_reading()
            self.loop.call_soon(self._read_on)
        return None

    def _read_on(self) -> None:
        if not self.http.flow.read_paused and not self.transport.is_closing():
            self.transport.resume_reading()

    @property
    def _busy(self) -> bool:
        """Whether a response is unfinished."""
        return self.http.cycle is not None and not self.http.cycle.response_complete

    def _too_slow(self) -> None:
        self._arrival = None
        begun, _ = self.http.conn.trailing_data
        if begun and self.http.conn.their_state is h11.IDLE:
            message = f"the request did not arrive within {self.settings.receive_timeout:g} seconds"
            self.refuse(RequestError(408, message, code="request_timeout"))
        elif not self._busy:
            self.transport.close()  # it has sent nothing, or still sends a body that was refused
        # Otherwise the body is slow: BodyLimits answers, with the same limit.

    def invalid(self, error: h11.ProtocolError) -> None:
        """Refuse what is not HTTP."""
        if error.error_status_hint == HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE:
            self.refuse(headers_too_large(self.settings))
        else:
            self.refuse(RequestError(400, "this is not a valid HTTP request", code="bad_http"))

    def refuse(self, error: RequestError, level: int = logging.INFO) -> None:
        """Send an error in place of a response, and close the connection."""
        if self.transport.is_closing():
            return None
        name = request_id(self.http.headers if self._busy else ())
        fields = {"id": name, "status": error.status}
        logger.log(level, "refused before it was a request: %s", error.message, extra={"fields": fields})
        if self._busy and self.http.cycle.response_started:
            return self._drop()  # an error would end up in the middle of another response
        if self.http.conn.our_state is h11.ERROR:
            return self.transport.close()  # it would be a second response
        head = {"content-type": "application/json", "content-length": str(len(error.content))}
        head |= error.headers or {}
        head |= {REQUEST_ID.decode(): name, "connection": "close"}
        lines = "".join(f"{key}: {value}\r\n" for key, value in head.items())
        status = f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}\r\n"
        self.transport.write(f"{status}{lines}\r\n".encode() + error.content)
        return self.transport.close()

    # The response.

    def pause_writing(self) -> None:
        self.http.pause_writing()
        self._watch_reader()

    def resume_writing(self) -> None:
        self._cancel_stalled()
        if not self.transport.is_closing():  # uvloop wakes a waiting writer before it reports the loss
            self.http.resume_writing()

    def _watch_reader(self) -> None:
        self._unread = self.transport.get_write_buffer_size()
        self._stalled = self.loop.call_later(self.settings.send_timeout, self._close_stalled)

    def _close_stalled(self) -> None:
        if self.transport.get_write_buffer_size() < self._unread:
            return self._watch_reader()  # it reads, but slowly
        logger.info("a client read nothing for %g seconds: its connection is closed", self.settings.send_timeout)
        return self._drop()

    def _drop(self) -> None:
        """Close at once. Without SO_LINGER 0 the kernel would keep the unread bytes."""
        self.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, NO_LINGER)
        self.transport.abort()

    def _cancel_timers(self) -> None:
        self._cancel_arrival()
        self._cancel_stalled()

    def _cancel_arrival(self) -> None:
        if self._arrival is not None:
            self._arrival.cancel()
            self._arrival = None

    def _cancel_stalled(self) -> None:
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None


class _Writer:
    """The transport that uvicorn writes to: the real one, but for the text that it sends for malformed HTTP."""

    def __init__(self, connection: Connection) -> None:
        self._connection = weakref.proxy(connection)  # no reference cycle: a closed connection goes at once
        self._transport = connection.transport

    def write(self, data: bytes) -> None:
        if isinstance(error := sys.exception(), h11.RemoteProtocolError):
            self._connection.invalid(error)
        else:
            self._transport.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class Shed:
    """Counts the connections refused for want of descriptors. The log has one warning in a period."""

    count = 0
    logged = -SHED_PERIOD

    def another(self, now: float) -> RequestError:
        self.count += 1
        if now - self.logged >= SHED_PERIOD:
            self.logged = now
            fields = {"refused": self.count}
            logger.warning("descriptors run out: new connections get a 503 and are closed", extra={"fields": fields})
        headers = {"retry-after": "5"}
        return RequestError(503, "too many connections are open", code="overloaded", headers=headers)


def _descriptors_run_out(newest: int) -> bool:
    """Whether few descriptors are left below the limit: a new one is the lowest that is free."""
    if sys.platform == "win32":
        return False
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return limit != resource.RLIM_INFINITY and newest >= limit - SPARE_DESCRIPTORS

"""Transport: uvicorn's HTTP connection with the limits that uvicorn has no options for.

uvicorn reads the head of a request without a limit of size or time, and waits for ever for a client that does not read.
Here both are limited, and a request that is refused below the application gets an error in OpenAI's format, with a
request id. A client that closes its sending side counts as disconnected: that looks the same as a client that is gone.
"""

import asyncio
import contextlib
import logging
import socket
import struct
import sys
from typing import Any, cast

from httptools import HttpParserCallbackError, HttpParserError, HttpParserUpgrade, HttpRequestParser
from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from phase6_integration.server.errors import RequestError, overloaded
from phase6_integration.server.middleware import REQUEST_ID, headers_too_large, request_id
from phase6_integration.server.settings import ServerSettings

if sys.platform != "win32":
    import resource

logger = logging.getLogger("nanoserve")

NO_LINGER = struct.pack("ii", 1, 0)
FRAMING = (b"content-length", b"transfer-encoding")
ENDLESS = 1 << 62  # bytes
SPARE_DESCRIPTORS = 32  # kept for the engine, files and responses; at the limit itself the kernel's answer is silence
SHED_PERIOD = 10.0  # seconds


class Connection(HttpToolsProtocol):
    """One connection; `connections` binds the class to a server's settings."""

    settings: ServerSettings
    _arrival: asyncio.TimerHandle | None = None  # ends a request that arrives too slowly
    _stalled: asyncio.TimerHandle | None = None  # closes the connection of a client that does not read
    _active: RequestResponseCycle | None = None  # the request that is being answered
    _head = 0  # bytes of an incomplete head; -1: a body follows
    _trailing = 0  # bytes since the last body data: chunk sizes and trailers
    _unread = 0  # bytes in the write buffer at the last check
    shed_count = 0  # connections refused by all of the bound class
    shed_logged = -SHED_PERIOD  # when the last warning about them was logged

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self.parser = cast(HttpRequestParser, UpgradeIgnoringParser(self))

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(cast(asyncio.Transport, transport))
        # Writing pauses as soon as the socket is full. With high=0 a TLS transport would pause with nothing to send.
        self.transport.set_write_buffer_limits(high=1, low=0)
        self._start_timer()
        if _descriptors_run_out(transport.get_extra_info("socket").fileno()):
            self._shed()

    def _shed(self) -> None:
        """Refuse a new connection. The log has one warning in a period, which says how many there were before it."""
        bound = type(self)
        bound.shed_count += 1
        if (now := self.loop.time()) - bound.shed_logged >= SHED_PERIOD:
            bound.shed_logged = now
            fields = {"refused": bound.shed_count}
            logger.warning("descriptors run out: new connections get a 503 and are closed", extra={"fields": fields})
        headers = {"retry-after": "5"}
        self._refuse(RequestError(503, "too many connections are open", code="overloaded", headers=headers), quiet=True)

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_timer()
        self._unset_keepalive_if_required()  # uvicorn does not after a connection reset
        self.resume_writing()
        self._notify_disconnect()
        cast(UpgradeIgnoringParser, self.parser).close()
        super().connection_lost(exc)
        self.pipeline.clear()  # requests that will not be answered
        self.cycle = None  # type: ignore[assignment]

    # The head.

    def data_received(self, data: bytes) -> None:
        if self._head >= 0:
            self._head += len(data)
        else:
            self._trailing += len(data)
        try:
            super().data_received(data)
        except Exception as error:  # of this server: uvicorn reports those of the parser to send_400_response
            self._refuse(self._blame(error))
        if self.transport.is_closing():
            return
        if max(self._head, self._trailing) > self.settings.max_header_bytes:
            self._refuse(headers_too_large(self.settings))
        elif self._arrival is None and not self._busy:
            self._start_timer()  # uvicorn takes line breaks between two requests for the start of one

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._head = max(self._head, 1)  # bytes in the same packet as the end of the previous message are not counted
        self._start_timer()

    def on_headers_complete(self) -> None:
        self._head = -1  # the body has its own limit, in BodyLimits
        super().on_headers_complete()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._head >= 0:  # uvicorn would add trailers to the headers
            super().on_header(name, value)

    def on_body(self, body: bytes) -> None:
        self._trailing = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._head = self._trailing = 0
        self._cancel_timer()
        super().on_message_complete()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._active = cycle
        super()._start_asgi_task(cycle, without_chunks(app, cycle) if cycle.scope["http_version"] == "1.0" else app)

    def _notify_disconnect(self) -> None:
        """Notify the request being answered of the disconnect; uvicorn notifies the newest, which may be another."""
        if self._active is not None and self._busy:
            self._active.disconnected = True
            self._active.message_event.set()

    def send_400_response(self, msg: str) -> None:
        """Called by uvicorn when the parser fails, even if it does because a callback of this server has raised."""
        error = sys.exception()
        self._refuse(self._blame(error.__context__ if isinstance(error, HttpParserCallbackError) else error))

    def _blame(self, error: BaseException | None) -> RequestError:
        """The client's error for malformed HTTP, and the server's for any other exception."""
        if error is None or isinstance(error, HttpParserError | ValueError):
            return RequestError(400, "this is not a valid HTTP request", code="bad_http")
        logger.error("reading a request failed", exc_info=error)
        if isinstance(error, MemoryError):
            return overloaded()
        return RequestError(500, "the server failed on this request; its log says why", code="internal_error")

    def _start_timer(self) -> None:
        self._cancel_timer()
        self._arrival = self.loop.call_later(self.settings.receive_timeout, self._too_slow)

    def _cancel_timer(self) -> None:
        if self._arrival is not None:
            self._arrival.cancel()
            self._arrival = None

    def _too_slow(self) -> None:
        self._arrival = None
        if self._head > 0:
            message = f"the request did not arrive within {self.settings.receive_timeout:g} seconds"
            self._refuse(RequestError(408, message, code="request_timeout"))
        elif not self._busy:
            self.transport.close()  # it has sent nothing, or still sends a body that was refused
        # Otherwise the body is slow: BodyLimits answers, with the same limit.

    @property
    def _busy(self) -> bool:
        """Whether a response is unfinished."""
        return self._active is not None and not self._active.response_complete

    def _refuse(self, error: RequestError, quiet: bool = False) -> None:
        name = request_id(self.headers or ())
        fields = {"id": name, "status": error.status}
        level = logging.DEBUG if quiet else logging.INFO
        logger.log(level, "refused before it was a request: %s", error.message, extra={"fields": fields})
        if self.pipeline or (self._active is not None and self._busy and self._active.response_started):
            return self._drop()  # an error would end up in the middle of another response
        head = {b"content-type": b"application/json", b"content-length": str(len(error.content)).encode()}
        head |= {key.encode(): value.encode() for key, value in (error.headers or {}).items()}
        head |= {REQUEST_ID: name.encode(), b"connection": b"close"}
        head |= {name.encode(): value.encode() for name, value in (error.headers or {}).items()}
        lines = b"".join(b"%s: %s\r\n" % pair for pair in head.items())
        self.transport.write(STATUS_LINE[error.status] + lines + b"\r\n" + error.content)
        return self.transport.close()

    # The response.

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_reader()

    def resume_writing(self) -> None:
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None
        super().resume_writing()

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
        self._notify_disconnect()  # first: uvloop wakes a waiting writer before it reports the loss
        self.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, NO_LINGER)
        self.transport.abort()


def _descriptors_run_out(newest: int) -> bool:
    """Whether few descriptors are left below the limit: a new one is the lowest that is free."""
    if sys.platform == "win32":
        return False
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return limit != resource.RLIM_INFINITY and newest >= limit - SPARE_DESCRIPTORS


def connections(settings: ServerSettings) -> type[Connection]:
    """The protocol class for uvicorn, bound to these settings."""
    return type("BoundConnection", (Connection,), {"settings": settings})


class UpgradeIgnoringParser:
    """An httptools parser that ignores `Upgrade`, which some clients send with every request, such as `h2c` of Java's.
    httptools ends such a message after its head. If it has a body, a head without the upgrade is parsed in its place,
    without events, and the body follows."""

    def __init__(self, protocol: Any) -> None:
        self._protocol = protocol
        self._framing = b""  # headers that delimit the body
        self._silent = False
        self.on_body = protocol.on_body
        self._parser = parser = HttpRequestParser(self)
        with contextlib.suppress(AttributeError):  # older versions of httptools have no such option
            parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn would
        self.get_method, self.get_http_version = parser.get_method, parser.get_http_version
        self.should_keep_alive = parser.should_keep_alive

    def close(self) -> None:
        """Break the reference cycle between the parser and the protocol."""
        self.__dict__.clear()

    def should_upgrade(self) -> bool:
        return False

    def feed_data(self, data: bytes) -> None:
        rest = memoryview(data)
        while rest:
            try:
                return self._parser.feed_data(rest)
            except HttpParserUpgrade as offer:
                rest = rest[offer.args[0] :]
            if self._framing:
                head = b"POST * HTTP/1.1\r\n" + self._framing + b"\r\n"
                self._framing, self._silent = b"", True
                self._parser.feed_data(head)
                self._silent = False
        return None

    # Called by httptools.

    def on_message_begin(self) -> None:
        if not self._silent:
            self._framing = b""
            self._protocol.on_message_begin()

    def on_url(self, url: bytes) -> None:
        if not self._silent:
            self._protocol.on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._silent:
            if name.lower() in FRAMING:
                self._framing += b"%s: %s\r\n" % (name, value)
            self._protocol.on_header(name, value)

    def on_headers_complete(self) -> None:
        if not self._silent:
            if not self._parser.should_upgrade():
                self._framing = b""
            self._protocol.on_headers_complete()

    def on_message_complete(self) -> None:
        if not self._framing:  # else its body is yet to come
            self._protocol.on_message_complete()


def without_chunks(app: ASGI3Application, cycle: RequestResponseCycle) -> ASGI3Application:
    """For HTTP/1.0, which has no chunked encoding: a response without a length ends with the connection. A length that
    is never reached keeps uvicorn from chunking; the last piece then reaches it."""

    async def answer(scope: Any, receive: Any, send: Any) -> None:
        async def sent(message: Any) -> None:
            if message["type"] == "http.response.start":
                if all(name.lower() != b"content-length" for name, _ in message.get("headers", ())):
                    cycle.chunked_encoding, cycle.expected_content_length = False, ENDLESS
            elif cycle.expected_content_length > ENDLESS // 2 and not message.get("more_body", False):
                cycle.expected_content_length = len(message.get("body", b""))
            await send(message)

        await app(scope, receive, sent)

    return answer

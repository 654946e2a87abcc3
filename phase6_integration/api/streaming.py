"""GenerationResponse: submits requests to the engine and sends their outputs, whole or as server-sent events."""

import asyncio
import logging
import time
from collections.abc import Sequence

from fastapi import Response
from starlette.types import Receive, Scope, Send

from phase0_request.batch import NO_TOKEN_LEFT
from phase0_request.queue import QueueFullError
from phase0_request.request import FinishReason, UnknownTokenError
from phase6_integration.api.additions import Asked, Prepare
from phase6_integration.api.errors import UNKNOWN_TOKEN, RequestError, fault, own_names, unavailable, unservable
from phase6_integration.api.formatter import Formatter
from phase6_integration.api.parsing import engine_request
from phase6_integration.api.state import Account, ServerState
from phase6_integration.process.health import UnavailableError
from phase6_integration.process.messages import EngineRequest
from phase6_integration.process.outputs import Chunk, OutputStream

logger = logging.getLogger("nanoserve")

PIECE = 1 << 16  # bytes: more is sent at once
WHOLE = ((b"content-type", b"application/json"),)
EVENTS = (
    (b"content-type", Formatter.stream_type),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx passes each event on at once
)


class ClientLeftError(Exception):
    """The client has disconnected."""


async def generate(
    server: ServerState, asked: Asked, prepare: Sequence[Prepare], formatter: Formatter
) -> "GenerationResponse":
    """The response to a request: features prepare it, then it becomes a message to the engine."""
    asked.own_fields = formatter.own_fields
    for feature in prepare:
        await feature(asked)
    message = engine_request(server, asked, formatter.id)
    return GenerationResponse(server, message, formatter, bool(asked.body.stream), asked.body.user)


class GenerationResponse(Response):
    """A completion. It aborts its requests when the client disconnects, streaming or not."""

    account: Account
    outputs: OutputStream
    writer: "ResponseWriter"
    request_id: str

    def __init__(
        self, server: ServerState, request: EngineRequest, formatter: Formatter, is_stream: bool, user: str | None
    ) -> None:
        super().__init__()
        self.server = server
        self.request = request
        self.formatter = formatter
        self.is_stream, self.user = is_stream, user

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Submit the requests and send their outputs, while a task waits for the client to disconnect."""
        formatter, account = self.formatter, scope["state"]["account"]
        self.account, self.request_id = account, scope["state"]["request_id"]
        account.prompt_tokens, account.n, account.user = formatter.prompt_tokens, formatter.n, self.user
        with self.server.lease(self.request, formatter.length_field), self._submit() as outputs:
            self.outputs, account.outputs = outputs, outputs.outputs
            formatter.begin(outputs.outputs)
            events = (b"content-type", formatter.stream_type), *EVENTS[1:]
            self.writer = ResponseWriter(send, [*(events if self.is_stream else WHOLE)])
            watching = asyncio.create_task(_abort_on_disconnect(receive, outputs))
            try:
                await (self.stream() if self.is_stream else self.whole())
            except ClientLeftError:
                return
            finally:
                watching.cancel()

    def _submit(self) -> OutputStream:
        try:
            return self.server.engine.submit(self.request)
        except QueueFullError:
            message = "too many requests are already waiting; try again later"
            raise RequestError(429, message, code="queue_full", headers={"retry-after": "1"}) from None
        except UnavailableError as error:
            raise unavailable(error.health) from None
        except UnknownTokenError as error:
            with own_names(self.formatter.own_fields):
                raise unservable(error.field, str(error), UNKNOWN_TOKEN) from None
        except ValueError as error:
            raise unservable(None, str(error)) from None

    async def whole(self) -> None:
        """Send the answer when it is complete: until then a failure can have its own status."""
        async for chunks in self.outputs:
            for chunk in chunks:
                self._check(chunk)
                self.formatter.accumulate(chunk)
        self._warn()
        for piece in self.formatter.whole():
            await self.writer.add(piece)
        await self.writer.send(more=False)

    async def stream(self) -> None:
        """Send events, and a comment in each long silence, so that no proxy or client gives the request up. The status
        is sent with the first of them: an earlier failure has a status of its own, a later one is an event. The last
        event is always `done`."""
        formatter, writer, keepalive = self.formatter, self.writer, self.server.settings.keepalive
        self._warn()
        # region exercise 6.3
        try:
            async for chunks in self.outputs.turns(keepalive):
                for chunk in chunks:
                    self._check(chunk)
                    await writer.add(formatter.to_chunk(chunk))
                if not chunks or writer.silence >= keepalive:  # tokens may come of which nothing is sent
                    await writer.add(formatter.keep_alive)
                await writer.send()
            last = formatter.last_chunk()
        except ClientLeftError:
            raise
        except Exception as error:
            if not writer.started:
                raise
            last = formatter.failed(self._as_event(error))
        await writer.add(last + formatter.done)
        await writer.send(more=False)
        # endregion

    def _warn(self) -> None:
        for addition in self.formatter.additions:
            for warning in addition.warnings(self.account.finish_reasons):
                self.writer.warn(warning)

    def _as_event(self, error: Exception) -> RequestError:
        """The error for the client. Anything but a RequestError is a fault of the server."""
        if isinstance(error, RequestError):
            return error
        logger.error(
            "a stream failed by a fault of the server", exc_info=error, extra={"fields": {"id": self.request_id}}
        )
        self.account.error = repr(error)
        return fault(self.request_id)

    def _check(self, chunk: Chunk) -> None:
        """Note a finish reason; raise if it is a failure."""
        if chunk.finish_reason is None:
            return
        self.account.finish_reasons.append(chunk.finish_reason.value)
        if chunk.finish_reason is FinishReason.ABORT:
            raise ClientLeftError
        if (failure := self._failure(chunk)) is not None:
            self.account.error = str(chunk.error or failure.message)
            raise failure

    def _failure(self, chunk: Chunk) -> RequestError | None:
        """The error for the client, without internals."""
        if chunk.finish_reason is FinishReason.TIMEOUT:
            return RequestError(408, "the request was not answered before its deadline", code="deadline_passed")
        if chunk.finish_reason is not FinishReason.ERROR:
            return None
        if isinstance(chunk.error, UnavailableError):
            return unavailable(chunk.error.health)
        error, additions = chunk.error or "", self.formatter.additions
        so_far = f"after {self.outputs.outputs[chunk.index].generated} tokens of the answer"
        excluding = [name for addition in additions for name in addition.excluding]
        if error == NO_TOKEN_LEFT and excluding:
            message = f"{so_far} there is no next one: {' and '.join(excluding)} exclude all of them"
            return unservable(excluding[0], message, "no_token_left")
        found = (addition.failure(error, so_far) for addition in additions)
        return next((failure for failure in found if failure is not None), None) or fault(self.request_id)


class ResponseWriter:
    """Collects the bytes of a response and sends them through ASGI. After PIECE bytes, other requests get a
    turn. A send waits while the client does not read; how long that may be is up to the server's transport."""

    def __init__(self, send: Send, headers: list[tuple[bytes, bytes]]) -> None:
        self.started = False  # whether the status is sent
        self._send = send
        self._headers = headers
        self._unsent = b""
        self._sent_at = time.monotonic()

    def warn(self, text: str) -> None:
        """Add a warning to the headers, which are sent with the first piece."""
        self._headers.append((b"warning", f'299 - "{text}"'.encode()))

    @property
    def silence(self) -> float:
        """The seconds since something was sent, or nothing if something is about to be."""
        return 0.0 if self._unsent else time.monotonic() - self._sent_at

    async def add(self, data: bytes) -> None:
        """Append bytes for `send` to send. Many bytes are sent at once."""
        self._unsent += data
        if len(self._unsent) > PIECE:
            await self.send()
            await asyncio.sleep(0)

    async def send(self, more: bool = True) -> None:
        """Send the added bytes, after the status. Without `more`, end the response; if that is the first send, it has a
        content-length."""
        body, self._unsent = self._unsent, b""  # no copy: a large event is in memory once
        if body:
            self._sent_at = time.monotonic()
        if not self.started:
            self.started = True
            length = [] if more else [(b"content-length", b"%d" % len(body))]
            await self._send({"type": "http.response.start", "status": 200, "headers": [*self._headers, *length]})
        if body or not more:
            await self._send({"type": "http.response.body", "body": body, "more_body": more})


async def _abort_on_disconnect(receive: Receive, outputs: OutputStream) -> None:
    while (await receive())["type"] != "http.disconnect":
        continue
    outputs.abort()

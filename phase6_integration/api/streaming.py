"""GenerationResponse: submits requests to the engine and sends their outputs, whole or as server-sent events."""

import asyncio
import logging
from collections.abc import AsyncIterator, Coroutine, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from fastapi import Response
from starlette.types import Message, Receive, Scope, Send

from phase0_request.batch import GRAMMAR_FAILED, GRAMMAR_REFUSED, NO_TOKEN_LEFT
from phase0_request.queue import QueueFullError
from phase0_request.request import FinishReason
from phase6_integration.api.errors import (
    RequestError,
    conflict,
    fault,
    grammar_failed,
    grammar_refused,
    no_token_left,
    unavailable,
)
from phase6_integration.api.formatter import Formatter
from phase6_integration.api.schemas import SamplingFields
from phase6_integration.api.state import Account, Lease, ServerState
from phase6_integration.process.health import UnavailableError
from phase6_integration.process.messages import EngineRequest
from phase6_integration.process.outputs import Chunk, OutputStream

logger = logging.getLogger("nanoserve")

KEEP_ALIVE = b": keep-alive\n\n"
PIECE = 1 << 16  # bytes of one send: larger bodies are sent in pieces
JSON = (b"content-type", b"application/json")
STREAM_HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx passes each event on at once
)


class SlowReaderError(Exception):
    """The client has not read for too long."""


class ClientLeftError(Exception):
    """The client has disconnected."""


class GenerationResponse(Response):
    """A completion. It aborts its requests when the client disconnects or stops reading, streaming or not."""

    def __init__(self, server: ServerState, request: EngineRequest, formatter: Formatter, body: SamplingFields) -> None:
        super().__init__()
        self._server = server
        self._request = request
        self._formatter = formatter
        self._stream = bool(body.stream)
        self._user = body.user

    # region exercise 6.5
    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Submit the requests and send their outputs, while a task waits for the client to disconnect."""
        formatter, account = self._formatter, scope["state"]["account"]
        account.prompt_tokens, account.n, account.user = formatter.prompt_tokens, formatter.n, self._user
        with self._server.lease(self._request, formatter.length_field) as lease, self._submit(lease) as outputs:
            account.outputs = formatter.outputs = outputs.outputs
            writer = ResponseWriter(send, self._server.settings.send_timeout)
            sender = _Sender(self._server, formatter, outputs, writer, account, scope["state"]["request_id"])
            async with _beside(_abort_on_disconnect(receive, outputs)):
                try:
                    await (sender.stream(lease) if self._stream else sender.whole(lease))
                except SlowReaderError as error:  # the response stays unfinished, so the server closes the connection
                    account.error = str(error)
                except ClientLeftError:
                    return

    # endregion

    def _submit(self, lease: Lease) -> OutputStream:
        try:
            lease.cover(self._formatter.text_bytes)
            outputs = self._server.engine.submit(self._request)
            lease.begin(self._formatter.prompt_tokens)
            return outputs
        except QueueFullError:
            message = "too many requests wait already; try again later"
            raise RequestError(429, message, code="queue_full", headers={"retry-after": "1"}) from None
        except UnavailableError as error:
            raise unavailable(error.health) from None
        except ValueError as error:
            raise conflict(None, str(error)) from None


@dataclass(frozen=True, slots=True)
class _Sender:
    """Sends the outputs of one request."""

    server: ServerState
    formatter: Formatter
    outputs: OutputStream
    writer: "ResponseWriter"
    account: Account
    request_id: str

    # region exercise 6.5
    async def whole(self, lease: Lease) -> None:
        """Send the answer once all of it is there: until then a failure has a status of its own."""
        async for chunks in self.outputs:
            for chunk in chunks:
                self._check(chunk)
                self.formatter.accumulate(chunk)
            lease.cover(self.formatter.text_bytes)
        self._answered()
        await self.writer.write_json(self.formatter.whole())

    async def stream(self, lease: Lease) -> None:
        """Send events. The status is sent once the engine has admitted the request (with a grammar: has drawn a token),
        so that an earlier failure has a status of its own; a later one is an event. A request that waits for long gets
        its status and comments, so that no proxy or client gives it up. The last event is always `done`."""
        admitted = await self.outputs.admitted(self.server.settings.keepalive)
        arriving = aiter(self.outputs)
        first = [self._event(chunk) for chunk in await anext(arriving, [])] if admitted and self._ended_early else []
        await self.writer.start(200, STREAM_HEADERS)
        async with _beside(self._keep_alive()):
            if not admitted:
                await self.writer.write(KEEP_ALIVE)
                await self.outputs.admitted()
            await self._write(first)
            try:
                async for chunks in arriving:
                    await self._send(chunks)
                    lease.cover(self.formatter.text_bytes)
                self._answered()
                last = self.formatter.last_chunk()
            except RequestError as error:
                last = self.formatter.failed(error)
            except (SlowReaderError, ClientLeftError):
                raise
            except Exception as error:
                logger.exception("a stream failed by a fault of the server", extra={"fields": {"id": self.request_id}})
                self.account.error = repr(error)
                last = self.formatter.failed(fault(self.request_id))
            await self.writer.write(last + self.formatter.done, more=False)

    # endregion

    def _answered(self) -> None:
        for note in self.server.answered:
            note(self.formatter.n, self.outputs.outputs)

    @property
    def _ended_early(self) -> bool:
        """Whether an output has ended. One that ended before it was admitted has neither time."""
        times = [output.times for output in self.outputs.outputs]
        return any(one.finished is not None for one in times) or all(one.admitted is None for one in times)

    # region exercise 6.5
    async def _send(self, chunks: Sequence[Chunk]) -> None:
        """Send all chunks since the last turn, in one send unless they are large."""
        events = []
        try:
            for chunk in chunks:
                events.append(self._event(chunk))
                if len(events[-1]) > PIECE:
                    await self._write(events)
                    events.clear()
                    await asyncio.sleep(0)  # other streams have a turn
        finally:
            await self._write(events)

    # endregion

    def _event(self, chunk: Chunk) -> bytes:
        self._check(chunk)
        return self.formatter.to_chunk(chunk)

    async def _write(self, events: Iterable[bytes]) -> None:
        if content := b"".join(events):
            await self.writer.write(content)

    # region exercise 6.5
    def _check(self, chunk: Chunk) -> None:
        """Note a finish reason, and raise if it is a failure."""
        if chunk.finish_reason is None:
            return
        self.account.finish_reasons.append(chunk.finish_reason.value)
        if chunk.finish_reason is FinishReason.ABORT:
            raise ClientLeftError
        if (failure := self._failure(chunk)) is not None:
            self.account.error = str(chunk.error or failure.message)
            raise failure

    # endregion

    def _failure(self, chunk: Chunk) -> RequestError | None:
        """The error for the client, without internals."""
        if chunk.finish_reason is FinishReason.TIMEOUT:
            return RequestError(408, "the request was not answered before its deadline", code="deadline_passed")
        if chunk.finish_reason is not FinishReason.ERROR:
            return None
        if isinstance(chunk.error, UnavailableError):
            return unavailable(chunk.error.health)
        fields, tokens = self.formatter.excluding, self.outputs.outputs[chunk.index].generated
        if chunk.error == NO_TOKEN_LEFT and fields:
            return no_token_left(fields, tokens)
        if chunk.error is not None and chunk.error.startswith(GRAMMAR_REFUSED):
            return grammar_refused(fields, chunk.error.removeprefix(f"{GRAMMAR_REFUSED}: "))
        if chunk.error is not None and chunk.error.startswith(GRAMMAR_FAILED):
            return grammar_failed(fields, tokens)
        return fault(self.request_id)

    # region exercise 6.5
    async def _keep_alive(self) -> None:
        """Send comments until cancelled. A client that does not read even these has its requests aborted."""
        try:
            await self.writer.keep_alive(self.server.settings.keepalive)
        except SlowReaderError as error:
            self.account.error = str(error)
            self.outputs.abort()

    # endregion


class ResponseWriter:
    """Sends a response through ASGI. A send that takes longer than `limit` seconds raises SlowReaderError."""

    def __init__(self, send: Send, limit: float) -> None:
        self._send = send
        self._limit = limit
        self._sending = False
        self._last_send = 0.0

    async def start(self, status: int, headers: Sequence[tuple[bytes, bytes]]) -> None:
        await self._put({"type": "http.response.start", "status": status, "headers": list(headers)})

    # region exercise 6.5
    async def write(self, body: bytes, more: bool = True) -> None:
        """Send bytes; without `more`, they end the response."""
        for start in range(0, max(len(body), 1), PIECE):
            last = start + PIECE >= len(body)
            piece = body[start : start + PIECE]
            await self._put({"type": "http.response.body", "body": piece, "more_body": more or not last})

    # endregion

    async def write_json(self, pieces: Iterator[bytes]) -> None:
        """Send a response while it is encoded. One that fits into a piece has a length."""
        body, headers = bytearray(), [JSON]
        for piece in pieces:
            body += piece
            if len(body) > PIECE:
                if headers:
                    await self.start(200, headers)
                    headers = []
                await self.write(bytes(body))
                body.clear()
                await asyncio.sleep(0)  # other requests have a turn
        if headers:
            await self.start(200, [*headers, (b"content-length", b"%d" % len(body))])
        await self.write(bytes(body), more=False)

    # region exercise 6.5
    async def keep_alive(self, seconds: float) -> None:
        """Send a comment after each such silence, until cancelled."""
        clock = asyncio.get_running_loop().time
        while True:
            silent = clock() - self._last_send
            if silent < seconds:
                await asyncio.sleep(seconds - silent)
            elif self._sending:  # the client has not read the previous send
                await asyncio.sleep(seconds)
            else:
                await self.write(KEEP_ALIVE)

    async def _put(self, message: Message) -> None:
        """Send one ASGI message, and note when. SlowReaderError if that takes longer than the limit."""
        self._sending = True
        try:
            async with asyncio.timeout(self._limit):
                await self._send(message)
        except TimeoutError:
            raise SlowReaderError(f"the client left what it was sent unread for {self._limit:g} seconds") from None
        finally:
            self._sending = False
        self._last_send = asyncio.get_running_loop().time()

    # endregion


async def _abort_on_disconnect(receive: Receive, outputs: OutputStream) -> None:
    while (await receive())["type"] != "http.disconnect":
        continue
    outputs.abort()


@asynccontextmanager
async def _beside(work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Run a task during the body of the `with`, and cancel it at the end."""
    task = asyncio.create_task(work)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])

"""Exchange: one request's asks to the engine, and its answers to the client, until either is done with the other."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from fastapi import Response
from starlette.types import Receive, Scope, Send

from phase0_request.queue import QueueFullError
from phase0_request.request import FinishReason
from phase6_integration.answers import Ask, Delta
from phase6_integration.async_engine import AsyncEngine, Health, UnavailableError
from phase6_integration.reply import Reply
from phase6_integration.server.access_log import Account
from phase6_integration.server.errors import RequestError, conflict
from phase6_integration.server.health import RETRY_AFTER
from phase6_integration.server.settings import ServerSettings
from phase6_integration.server.shape import Shape
from phase6_integration.server.sse import DONE, PIECE, STREAM_HEADERS, Line, SlowReaderError, event

logger = logging.getLogger("nanoserve")

LONG = 200  # tokens with logprobs; fewer are written down in a few milliseconds, and wait for nobody
_SCRIBE = ThreadPoolExecutor(1, "scribe")  # one: more would not be faster, and each has a heap of its own


class Exchange(Response):
    """The response to a completion. A client that leaves, streaming or not, takes its asks with it."""

    def __init__(
        self,
        engine: AsyncEngine,
        settings: ServerSettings,
        asks: Sequence[Ask],
        shape: Shape,
        stream: bool,
        user: str | None,
    ) -> None:
        super().__init__()
        self._engine = engine
        self._settings = settings
        self._asks = asks
        self._shape = shape
        self._streams = stream
        self._user = user

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        account: Account = scope["state"]["account"]
        call = self._shape.call
        account.prompt_tokens, account.n, account.user = call.prompt_tokens, call.n, self._user
        with self._submit() as reply:
            account.answers = self._shape.answers = reply.answers
            line = Line(send, self._settings.send_timeout)
            answering = _Answering(self._engine, self._shape, reply, line, account, scope["state"]["request_id"])
            async with _beside(_watch(receive, reply)):
                try:
                    if self._streams:
                        await answering.in_chunks(self._settings.keepalive)
                    else:
                        await answering.whole()
                except SlowReaderError as error:  # the response stays unfinished, so the server cuts the connection
                    account.error = str(error)
                except ClientLeftError:
                    return

    def _submit(self) -> Reply:
        try:
            return self._engine.submit(self._asks)
        except QueueFullError:
            message = "too many requests wait already; try again later"
            raise RequestError(429, message, code="queue_full", headers={"retry-after": "1"}) from None
        except UnavailableError as error:
            raise unavailable(error.health) from None
        except ValueError as error:
            raise conflict(None, str(error)) from None


class ClientLeftError(Exception):
    """There is nobody left to answer."""


@dataclass(frozen=True, slots=True)
class _Answering:
    engine: AsyncEngine
    shape: Shape
    reply: Reply
    line: Line
    account: Account
    request_id: str

    async def whole(self) -> None:
        async for deltas in self.reply:
            for delta in deltas:
                self._check(delta)
                self.shape.take(delta)
        whole = self.shape.whole
        body = await _aside(whole) if self.shape.scores > LONG else whole()
        length = str(len(body)).encode()
        await self.line.start(200, [(b"content-type", b"application/json"), (b"content-length", length)])
        await self.line.write(body, more=False)

    # region stream
    async def in_chunks(self, keep_alive: float) -> None:
        """The status is sent once the engine has made room: what goes wrong before that has a status of its own. What
        goes wrong later is an event. The last word is [DONE], whatever came before it."""
        await self.reply.admitted()
        news = aiter(self.reply)
        first = [self._told(delta) for delta in await anext(news, [])] if self._ended_early else []
        await self.line.start(200, STREAM_HEADERS)
        async with _beside(self._keep_alive(keep_alive)):
            await self._write([*map(self.shape.chunk, self.shape.opening()), *first])
            # region exercise 6.4
            try:
                async for deltas in news:
                    await self._deliver(deltas)
                last = self.shape.last_chunk()
            except RequestError as error:
                last = event(error.content)
            except (SlowReaderError, ClientLeftError):
                raise
            except Exception as error:
                logger.exception("a stream failed by a fault of the server", extra={"fields": {"id": self.request_id}})
                self.account.error = repr(error)
                last = event(self._fault.content)
            await self.line.write(last + DONE, more=False)
            # endregion

    # endregion

    @property
    def _ended_early(self) -> bool:
        """Whether an answer has ended already; if none was given room, that is what happened."""
        times = [answer.times for answer in self.reply.answers]
        return any(one.finished is not None for one in times) or all(one.admitted is None for one in times)

    async def _deliver(self, deltas: Sequence[Delta]) -> None:
        """All that has come since the last turn, in one send."""
        chunks = []
        try:
            for delta in deltas:
                chunks.append(self._told(delta))
                if len(chunks[-1]) > PIECE:
                    await asyncio.sleep(0)  # others have a turn between two large ones
        finally:
            await self._write(chunks)

    def _told(self, delta: Delta) -> bytes:
        self._check(delta)
        return self.shape.told(delta)

    async def _write(self, chunks: Iterable[bytes]) -> None:
        if content := b"".join(chunks):
            await self.line.write(content)

    def _check(self, delta: Delta) -> None:
        """Note an end. If it is not one that a client asked for, there is nothing more to deliver."""
        if delta.finish_reason is None:
            return
        self.account.finish_reasons.append(delta.finish_reason.value)
        if delta.finish_reason is FinishReason.ABORT:
            raise ClientLeftError
        if (failure := self._failure(delta)) is not None:
            self.account.error = delta.error or failure.message
            raise failure

    def _failure(self, delta: Delta) -> RequestError | None:
        """Why the engine did not answer, as far as that is the client's business."""
        if delta.finish_reason is FinishReason.TIMEOUT:
            return RequestError(408, "the request was not answered before its deadline", code="deadline_passed")
        if delta.finish_reason is not FinishReason.ERROR:
            return None
        if self.engine.health is not Health.READY:
            return unavailable(self.engine.health)
        return self._fault

    @property
    def _fault(self) -> RequestError:
        message = f"the server failed on this request; its log says why under the id {self.request_id}"
        return RequestError(500, message, code="internal_error")

    async def _keep_alive(self, seconds: float) -> None:
        try:
            await self.line.keep_alive(seconds)
        except SlowReaderError as error:
            self.account.error = str(error)
            self.reply.abort()


def unavailable(health: Health) -> RequestError:
    message = f"the engine is {health.value}; try again later"
    return RequestError(503, message, code=health.value, headers={"retry-after": str(RETRY_AFTER.get(health, 30))})


async def _aside(whole: Callable[[], bytes]) -> bytes:
    """What can be a second's work, without holding up the others."""
    return await asyncio.get_running_loop().run_in_executor(_SCRIBE, whole)


async def _watch(receive: Receive, reply: Reply) -> None:
    """A client that hangs up has no use for an answer."""
    while (await receive())["type"] != "http.disconnect":
        continue
    reply.abort()


@asynccontextmanager
async def _beside(work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Something that goes on for as long as the body of the `with` runs, and no longer."""
    task = asyncio.create_task(work)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])

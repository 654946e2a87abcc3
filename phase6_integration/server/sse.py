"""SSE: events on their way to one client, who may be slow, silent or gone."""

import asyncio
from collections.abc import Sequence

from starlette.types import Message, Send

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"
PIECE = 1 << 16  # bytes; more than this is not put into a client's buffer at once
STREAM_HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would gather it
)


class SlowReaderError(Exception):
    """A client has left what it was sent unread for too long."""


def event(content: bytes) -> bytes:
    return b"data: " + content + b"\n\n"


class Line:
    """The way to a client. A send that takes longer than `limit` seconds is the last one."""

    def __init__(self, send: Send, limit: float) -> None:
        self._send = send
        self._limit = limit
        self._sending = False
        self._spoke = 0.0

    async def start(self, status: int, headers: Sequence[tuple[bytes, bytes]]) -> None:
        await self._put({"type": "http.response.start", "status": status, "headers": list(headers)})

    async def write(self, body: bytes, more: bool = True) -> None:
        """Send bytes; without `more`, as the end of the response."""
        for start in range(0, len(body), PIECE):
            last = start + PIECE >= len(body)
            piece = body[start : start + PIECE]
            await self._put({"type": "http.response.body", "body": piece, "more_body": more or not last})

    async def keep_alive(self, seconds: float) -> None:
        """Whenever there was silence for so long, send a comment. Runs until it is cancelled."""
        clock = asyncio.get_running_loop().time
        while True:
            silent = clock() - self._spoke
            if silent < seconds:
                await asyncio.sleep(seconds - silent)
            elif self._sending:  # not silent: waiting for the client
                await asyncio.sleep(seconds)
            else:
                await self.write(KEEP_ALIVE)

    async def _put(self, message: Message) -> None:
        self._sending = True
        try:
            async with asyncio.timeout(self._limit):
                await self._send(message)
        except TimeoutError:
            raise SlowReaderError(f"the client left what it was sent unread for {self._limit:g} seconds") from None
        finally:
            self._sending = False
        self._spoke = asyncio.get_running_loop().time()

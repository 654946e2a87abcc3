"""GET /record: the engine's record, live, as server-sent events: its header, a snapshot, and one line per step.

It contains the text of requests only if `--playground-text` allows that. The engine waits for no reader: a slow reader
misses lines, which the record says, and the transport disconnects a reader that reads nothing. A page of another site
could not read the record, but could make the engine write it. So it is refused, by the origin that browsers report.
"""

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Annotated

import msgspec
from fastapi import APIRouter, Depends, FastAPI, Request, Response
from starlette.types import Receive, Scope, Send

from phase6_integration.api.errors import RequestError, unavailable
from phase6_integration.api.formatter import KEEP_ALIVE
from phase6_integration.api.settings import ServerSettings, default_hosts
from phase6_integration.api.state import Server, ServerState
from phase6_integration.api.streaming import EVENTS
from phase6_integration.extras.page.page_settings import PageSettings
from phase6_integration.extras.page.watcher import Watchers
from phase6_integration.process.health import Health

MOST_WATCHERS = 16  # each one costs the server the encoding of every line
MOST_OF_A_CLIENT = 4
PAUSE = 0.02  # seconds between two pieces: a page has no use for more
encode = msgspec.json.encode
router = APIRouter(include_in_schema=False)  # it has no end, and no JSON


@dataclass(frozen=True, slots=True)
class LiveRecord:
    """The watchers of the record: how many there may be, who they may be, and what they see."""

    watchers: Watchers
    allowed_origins: Sequence[str]
    text: bool  # of all requests


def attach(app: FastAPI, allowed_origins: Sequence[str], has_keys: bool) -> None:
    server: ServerState = app.state.server
    text = shows_text(server.settings, is_open=not (has_keys or allowed_origins))
    app.state.live_record = LiveRecord(Watchers(server.engine), allowed_origins, text)
    app.include_router(router)


def _live_record(request: Request) -> LiveRecord:
    live: LiveRecord = request.app.state.live_record
    return live


Live = Annotated[LiveRecord, Depends(_live_record)]


def shows_text(settings: ServerSettings, is_open: bool) -> bool:
    """Whether watchers see the text of all requests. Without the flag, only if every request is local: no keys and
    no pages of other origins (`is_open`), a loopback address, and no sign of a proxy."""
    if (chosen := settings.of(PageSettings).playground_text) is not None:
        return chosen
    local = default_hosts(settings.host)
    proxied = settings.uds is not None or settings.root_path is not None or {*settings.allowed_hosts} - {*local}
    return bool(local) and is_open and not proxied


@router.get("/record")
async def record(request: Request, server: Server, live: Live) -> Response:
    """What the engine does from now on."""
    if not server.engine.has_side_messages:
        raise RequestError(404, "the replicas of a cluster cannot be watched", code="no_record")
    if server.engine.health is not Health.READY:
        raise unavailable(server.engine.health)
    if is_foreign(request.headers, live.allowed_origins):
        message = "a page of another site may not watch the engine; --allowed-origins names those that may"
        raise RequestError(403, message, code="foreign_page")
    watching, tenant = live.watchers.by_client, request.state.client
    if watching.total() >= MOST_WATCHERS or watching[tenant] >= MOST_OF_A_CLIENT:
        message = f"the engine is watched already: {MOST_WATCHERS} times at most, and {MOST_OF_A_CLIENT} by one client"
        raise RequestError(429, message, code="too_many_watchers", headers={"retry-after": "30"})
    if request.scope.get("head"):
        return Response(headers={name.decode(): value.decode() for name, value in EVENTS})
    return Watching(server.settings, live, tenant)


def is_foreign(headers: Mapping[str, str], allowed_origins: Sequence[str]) -> bool:
    """Whether a page of an origin that is not allowed asks, according to its browser."""
    allowed = "*" in allowed_origins or headers.get("origin") in allowed_origins
    return headers.get("sec-fetch-site", "none") not in ("none", "same-origin") and not allowed


class Watching(Response):
    """Sends lines until the client leaves or the engine ends."""

    def __init__(self, settings: ServerSettings, live: LiveRecord, tenant: str) -> None:
        super().__init__()
        self.settings = settings
        self.watchers, self.text = live.watchers, live.text
        self.tenant = tenant

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.watchers.by_client[self.tenant] += 1
        sending, leaving = asyncio.create_task(self.send_lines(send)), asyncio.create_task(_left(receive))
        try:
            await asyncio.wait({sending, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                sending.result()
        finally:
            self.watchers.by_client -= Counter((self.tenant,))  # drops those with none
            leaving.cancel()
            sending.cancel()
            await asyncio.wait({sending})  # it is a watcher until then

    async def send_lines(self, send: Send) -> None:
        """Send events, several at once if possible, and a comment in each long silence. The answer begins once the
        engine writes: all that a client asks for after that is in the record."""
        settings = self.settings
        async with aclosing(self.watchers.watch(self.text, settings.keepalive)) as watched:
            lines = await anext(watched, None)
            await send({"type": "http.response.start", "status": 200, "headers": [*EVENTS]})
            while lines is not None:
                named = (line | {"model": settings.model_name} if "record" in line else line for line in lines)
                body = b"".join(b"data: %b\n\n" % encode(line) for line in named) or KEEP_ALIVE
                await send({"type": "http.response.body", "body": body, "more_body": True})
                await asyncio.sleep(PAUSE)
                lines = await anext(watched, None)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        continue

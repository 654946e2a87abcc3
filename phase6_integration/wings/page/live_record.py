"""GET /record: the engine's record, live, as server-sent events: its header, a snapshot, and a line for each step.

The text of requests is part of it only if `--playground-text` allows that. The engine waits for no reader: lines that a
slow one misses are left out, which the record says, and one that reads nothing is disconnected by the transport.
"""

import asyncio

from fastapi import APIRouter, FastAPI, Response
from starlette.types import Receive, Scope, Send

from phase6_integration.api.errors import RequestError, unavailable
from phase6_integration.api.settings import ServerSettings, default_hosts
from phase6_integration.api.state import Server, ServerState
from phase6_integration.api.streaming import EVENTS, KEEP_ALIVE
from phase6_integration.process.health import Health

MOST_WATCHERS = 16  # each one costs the server the encoding of every line
router = APIRouter(include_in_schema=False)  # it has no end, and no JSON


def attach(app: FastAPI) -> None:
    app.include_router(router)


def shows_text(settings: ServerSettings) -> bool:
    """Whether watchers see the text of all requests. Without the flag, only if nobody but the users of this machine can
    watch: without keys, on a loopback address, and with no sign of a proxy."""
    if settings.playground_text is not None:
        return settings.playground_text
    proxied = settings.uds is not None or settings.root_path is not None
    return not settings.api_keys and not proxied and bool(default_hosts(settings.host))

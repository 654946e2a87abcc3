"""Guard: what stands before every route. A request is named, timed, checked and let in; or it is refused.

`app.add_middleware(Guard, settings=settings)` puts it there. A route then finds `request.state.request_id` and
`request.state.account`, in which it tells the access log what it served.
"""

import asyncio
import logging

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from phase6_integration.server.access_log import AccessLog
from phase6_integration.server.auth import Auth
from phase6_integration.server.errors import RequestError
from phase6_integration.server.limits import BodyLimits, HeaderLimits
from phase6_integration.server.request_ids import RequestIds
from phase6_integration.server.settings import ServerSettings

logger = logging.getLogger("nanoserve")


class Guard:
    """The whole stack, outermost first: name, log, last resort, headers, key, body, HEAD."""

    def __init__(self, app: ASGIApp, settings: ServerSettings) -> None:
        inner = Auth(BodyLimits(Heads(app), settings), settings.api_keys)
        self.app = RequestIds(AccessLog(LastResort(HeaderLimits(inner, settings))))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.app(scope, receive, send)


class Heads:
    """HEAD is GET without the body: the routes answer the one, and uvicorn sends none for the other."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        head = scope["type"] == "http" and scope["method"] == "HEAD"
        await self.app({**scope, "method": "GET"} if head else scope, receive, send)


class LastResort:
    """An exception that nobody caught is a fault of ours: the log has all of it, the client a 500 and a request id. A
    request that is cancelled is one that outlasted the server."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        name, started = scope["state"]["request_id"], False

        async def noted(message: Message) -> None:
            nonlocal started
            started = started or message["type"] == "http.response.start"
            await send(message)

        try:
            return await self.app(scope, receive, noted)
        except asyncio.CancelledError:
            logger.info("a request was cut off by the end of the server", extra={"fields": {"id": name}})
            if not started:
                message = "the server has ended; try again later"
                await RequestError(503, message, code="stopped", headers={"retry-after": "10"}).response(
                    scope, receive, send
                )
            return None
        except Exception:
            logger.exception("a request failed by a fault of the server", extra={"fields": {"id": name}})
            if not started:
                message = f"the server failed on this request; its log says why under the id {name}"
                await RequestError(500, message, code="internal_error").response(scope, receive, send)
            return None  # begun and not completed: the server cuts the connection, which a client notices

"""The application of the core, which gives every request an id, an account, and an answer to any fault."""

import asyncio
import logging
import re
import uuid
from collections.abc import Iterable, Sequence
from importlib.metadata import version

from fastapi import FastAPI, Request
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from phase6_integration.api import chat, completions, errors, model_routes
from phase6_integration.api.errors import RequestError, fault, overloaded
from phase6_integration.api.settings import ServerSettings
from phase6_integration.api.state import Account, ServerState
from phase6_integration.process.async_engine import AsyncEngine

REQUEST_ID = b"x-request-id"
REQUEST_IDS = REQUEST_ID, b"request-id"  # of responses: OpenAI's clients read the first, Anthropic's the second
_SANE_ID = re.compile(rb"[!-~]{1,128}")
logger = logging.getLogger("nanoserve")


# region application
def application(
    engine: AsyncEngine,
    settings: ServerSettings,
    outside: Sequence[Middleware] = (),
    inside: Sequence[Middleware] = (),
) -> FastAPI:
    """An app that answers chats and completions, and says which models it serves. The engine may still be loading.
    Middleware of extras stands outside, where it sees all responses, or inside, before the routes."""
    app = FastAPI(
        title="nano-serving",
        version=version("nano-serving"),
        description="An OpenAI-style server of one model.",
        docs_url=None,
        redoc_url=None,
        separate_input_output_schemas=False,
        redirect_slashes=False,
        responses=errors.RESPONSES,
        servers=[{"url": settings.root_path}] if settings.root_path else None,
        middleware=[*outside, Middleware(Exchanges), *inside],
    )
    app.state.server = ServerState.of(engine, settings)
    for routes in (completions, chat, model_routes):
        app.include_router(routes.router)
    errors.install(app)
    return app


# endregion


class HttpMiddleware:
    """Handles HTTP requests. Anything else, such as a server's lifespan, goes on to the application."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await (self.handle if scope["type"] == "http" else self.app)(scope, receive, send)

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        raise NotImplementedError


class BodyLimit(HttpMiddleware):
    """Refuses bodies above a size limit, unless an extra limits their memory and time."""

    def __init__(self, app: ASGIApp, most: int) -> None:
        super().__init__(app)
        self.most = most

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        size = 0

        async def counted() -> Message:
            nonlocal size
            message = await receive()
            size += len(message.get("body", b""))
            if size > self.most:
                large = f"the body is too large: at most {self.most} bytes are read"
                raise RequestError(413, large, code="body_too_large")
            return message

        await self.app(scope, counted, send)


class Exchanges(HttpMiddleware):
    """Gives each request an id, which every response repeats in its headers, and an account for the log. They are in
    `request.state`, with `client`, the name of the client: without an extra that knows clients, all are one.

    What fails by a fault of the server is logged, and answered by a 500 with the id and no details. A request that is
    cancelled because the server ends gets a 503. A response that has begun stays unfinished: the server closes the
    connection, which the client notices."""

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        name, started = request_id(scope["headers"]), False
        scope.setdefault("state", {}).update(request_id=name, account=Account(), client="")
        fields = {"fields": {"id": name}}

        async def named(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                kept = [(key, value) for key, value in message.get("headers", ()) if key.lower() not in REQUEST_IDS]
                message = {**message, "headers": [*kept, *((key, name.encode("ascii")) for key in REQUEST_IDS)]}
            await send(message)

        try:
            return await self.app(scope, receive, named)
        except asyncio.CancelledError:
            logger.info("a request was cut off by the end of the server", extra=fields)
            message = "the server has ended; try again later"
            error = RequestError(503, message, code="stopped", headers={"retry-after": "10"})
        except Exception as failure:
            logger.exception("a request failed by a fault of the server", extra=fields)
            error = overloaded() if isinstance(failure, MemoryError) else fault(name)
        if not started:
            response = await errors.respond(Request(scope), error)
            await response(scope, receive, named)
        return None


def request_id(headers: Iterable[tuple[bytes, bytes]]) -> str:
    """The client's request id, if it sent exactly one that is safe in a header and a log; otherwise a new one."""
    given = [value for name, value in headers if name == REQUEST_ID]
    if len(given) == 1 and _SANE_ID.fullmatch(given[0]):
        return given[0].decode("ascii")
    return uuid.uuid4().hex

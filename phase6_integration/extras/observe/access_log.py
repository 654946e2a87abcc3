"""The access log: one line per request, when it is over."""

import logging
import time
from typing import Any

from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from phase6_integration.api.application import HttpMiddleware
from phase6_integration.api.settings import ServerSettings
from phase6_integration.api.state import Account

access = logging.getLogger("nanoserve.access")
CLIENT_LEFT = 499  # logged, never sent
HEALTH = {"/health", "/health/", "/health/live", "/health/ready", "/ping"}
POLLED = frozenset({*HEALTH, "/load", "/v1/load", "/metrics", "/stats"})
LONGEST_PATH = 200  # characters of a path in the log


def layer(settings: ServerSettings) -> Middleware:
    return Middleware(AccessLog, root=settings.root_path or "")


class AccessLog(HttpMiddleware):
    """When a request is over, logs what its route reported in `request.state.account`, with status and duration.
    Polled routes are logged at debug level while they succeed, and while the model loads."""

    def __init__(self, app: ASGIApp, root: str) -> None:
        super().__init__(app)
        self.root = root

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        start = time.perf_counter()
        status = 0
        sent = left = False

        async def counted(message: Message) -> None:
            nonlocal status, sent
            status = message.get("status", status)
            await send(message)
            sent = message["type"] == "http.response.body" and not message.get("more_body", False)

        async def watched() -> Message:
            nonlocal left
            message = await receive()
            left = left or (message["type"] == "http.disconnect" and not sent)
            return message

        try:
            await self.app(scope, watched, counted)
        finally:
            account: Account = scope["state"]["account"]
            ended = status if sent and not left else CLIENT_LEFT
            # The path as sent, still percent-encoded, cannot contain a line break. The query is not logged.
            path = bytes(scope.get("raw_path") or b"").decode("latin-1") or str(scope["path"])
            fields = {
                "id": scope["state"]["request_id"],
                "method": scope["method"],
                "path": path[:LONGEST_PATH],
                "status": ended,
                **about(account),
                "total": round(time.perf_counter() - start, 6),
            }
            polled = scope["path"].removeprefix(self.root) in POLLED and (ended == 200 or account.code == "loading")
            access.log(logging.DEBUG if polled else logging.INFO, "request", extra={"fields": fields})


def about(account: Account) -> dict[str, Any]:
    """The known facts about a request, for its line."""
    known: dict[str, Any] = {}
    if account.outputs:
        waits = [output.times.queue_time for output in account.outputs if output.times.queue_time is not None]
        first_tokens = [output.times.ttft for output in account.outputs if output.times.ttft is not None]
        known = {
            "prompt_tokens": account.prompt_tokens,
            "cached_tokens": sum(output.cached_tokens for output in account.outputs[:: account.n]),
            "generated_tokens": sum(output.generated for output in account.outputs),
            "queue": round(min(waits), 6) if waits else None,
            "ttft": round(min(first_tokens), 6) if first_tokens else None,
            "finish_reason": ",".join(sorted(set(account.finish_reasons))) or None,
        }
    known |= {name: getattr(account, name) for name in ("user", "request_id", "error", "code", "param")}
    return {name: value for name, value in known.items() if value is not None}

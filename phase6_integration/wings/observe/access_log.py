"""The access log: a line for each request, when it is over."""

import logging
import time
from typing import Any

from starlette.middleware import Middleware
from starlette.types import Message, Receive, Scope, Send

from phase6_integration.api.application import HttpMiddleware
from phase6_integration.api.state import Account

access = logging.getLogger("nanoserve.access")
CLIENT_LEFT = 499  # logged, never sent
_POLLED = frozenset(
    {"/health", "/health/live", "/health/ready", "/ping", "/load", "/v1/load", "/metrics", "/stats"}
)  # logged at debug level while they succeed, and while the model loads
_LONGEST_PATH = 200  # characters of a path in the log


class AccessLog(HttpMiddleware):
    """Logs what the route reports in `request.state.account`, with status and duration, when the request is over."""

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        start = time.perf_counter()
        account: Account = scope["state"]["account"]
        status = 0
        sent = left = False

        async def counted(message: Message) -> None:
            nonlocal status, sent
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)
            if message["type"] == "http.response.body" and not message.get("more_body", False):
                sent = True

        async def watched() -> Message:
            nonlocal left
            message = await receive()
            left = left or (message["type"] == "http.disconnect" and not sent)
            return message

        try:
            await self.app(scope, watched, counted)
        finally:
            ended = status if sent and not left else CLIENT_LEFT
            fields = {
                "id": scope["state"]["request_id"],
                "method": scope["method"],
                "path": _path(scope),
                "status": ended,
                **about(account),
                "total": round(time.perf_counter() - start, 6),
            }
            polled = scope["path"] in _POLLED and (ended == 200 or account.code == "loading")
            access.log(logging.DEBUG if polled else logging.INFO, "request", extra={"fields": fields})


def _path(scope: Scope) -> str:
    """The path as sent, still percent-encoded, so that it cannot contain a line break. The query is not logged."""
    return bytes(scope.get("raw_path") or b"").decode("latin-1")[:_LONGEST_PATH] or str(scope["path"])[:_LONGEST_PATH]


def about(account: Account) -> dict[str, Any]:
    """The fields of the log line that are known."""
    given = {name: getattr(account, name) for name in ("user", "request_id", "error", "code", "param")}
    if not account.outputs:
        return {name: value for name, value in given.items() if value is not None}
    times = [output.times for output in account.outputs]
    waits = [t.queue_time for t in times if t.queue_time is not None]
    first_tokens = [t.ttft for t in times if t.ttft is not None]
    known = {
        "prompt_tokens": account.prompt_tokens,
        "cached_tokens": sum(output.cached_tokens for output in account.outputs[:: account.n]),
        "generated_tokens": sum(output.generated for output in account.outputs),
        "queue": round(min(waits), 6) if waits else None,
        "ttft": round(min(first_tokens), 6) if first_tokens else None,
        "finish_reason": ",".join(sorted(set(account.finish_reasons))) or None,
        **given,
    }
    return {name: value for name, value in known.items() if value is not None}


LAYER = Middleware(AccessLog)

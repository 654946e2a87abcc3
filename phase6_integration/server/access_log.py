"""AccessLog: one line a request, written when it is over, whatever its end was."""

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from phase6_integration.answers import AnswerState

CLIENT_LEFT = 499  # logged, never sent
_POLLED = frozenset({"/health", "/metrics"})  # by machines, every few seconds: not worth a line as long as all is well
_LONGEST_PATH = 200  # characters of it that are written

logger = logging.getLogger("nanoserve.access")


@dataclass(slots=True)
class Account:
    """What a route tells of the request it serves, through `request.state.account`. Its times are the engine's."""

    prompt_tokens: int = 0  # as the usage has it: of each prompt once
    answers: Sequence[AnswerState] = ()  # `reply.answers`
    n: int = 1  # of them to each prompt
    user: str | None = None  # as the client calls whom it asks for
    finish_reasons: list[str] = field(default_factory=list)  # one for each answer that has ended
    error: str | None = None  # what went wrong, for the log alone

    def fields(self) -> dict[str, Any]:
        """What is known, by the names of the log."""
        about = {"user": self.user, "error": self.error}
        if not self.answers:
            return {name: value for name, value in about.items() if value is not None}
        times = [answer.times for answer in self.answers]
        waits = [t.queue for t in times if t.queue is not None]
        first_tokens = [t.ttft for t in times if t.ttft is not None]
        known = {
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": sum(answer.cached_tokens for answer in self.answers[:: self.n]),
            "generated_tokens": sum(answer.generated for answer in self.answers),
            "queue": round(min(waits), 6) if waits else None,
            "ttft": round(min(first_tokens), 6) if first_tokens else None,
            "finish_reason": ",".join(sorted(set(self.finish_reasons))) or None,
            **about,
        }
        return {name: value for name, value in known.items() if value is not None}


class AccessLog:
    """Puts an empty `account` into the state of the scope and logs it, with status and time, at the end."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        start = time.perf_counter()
        account = scope["state"]["account"] = Account()
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
                **account.fields(),
                "total": round(time.perf_counter() - start, 6),
            }
            polled = fields["path"] in _POLLED and ended == 200
            logger.log(logging.DEBUG if polled else logging.INFO, "request", extra={"fields": fields})


def _path(scope: Scope) -> str:
    """The path as it was sent, percent signs and all: nothing in it can begin a new line. The query is not written."""
    return bytes(scope.get("raw_path") or b"").decode("latin-1")[:_LONGEST_PATH] or str(scope["path"])[:_LONGEST_PATH]

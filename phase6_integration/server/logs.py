"""Logging: formatters, as text or JSON, and the access log with one line per request."""

import json
import logging
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from phase6_integration.log_stream import LogStream
from phase6_integration.outputs import OutputState
from phase6_integration.server.settings import ServerSettings

CLIENT_LEFT = 499  # logged, never sent
_POLLED = frozenset(
    {"/health", "/health/live", "/health/ready", "/ping", "/load", "/v1/load", "/metrics"}
)  # logged at debug level while they succeed, and while the model loads
_LONGEST_PATH = 200  # characters of a path in the log
access = logging.getLogger("nanoserve.access")
_OURS = ("nanoserve", "phase6_integration", "uvicorn", "asyncio")


class HumanFormatter(logging.Formatter):
    """Time, level, message, and fields as name=value."""

    def format(self, record: logging.LogRecord) -> str:
        pairs = "".join(f" {name}={_short(value)}" for name, value in _fields(record).items())
        line = f"{_time(record):%H:%M:%S} {record.levelname.lower():7} {record.getMessage()}{pairs}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class JsonFormatter(logging.Formatter):
    """One JSON object per line."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": _time(record).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_fields(record),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=True, default=str)


def configure(settings: ServerSettings) -> None:
    """Log to stderr, which never blocks from here on, in the format and from the level of the settings. Loggers of
    other libraries are left alone."""
    sys.stderr = LogStream(sys.stderr.fileno(), _report_dropped)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if settings.log_format == "json" else HumanFormatter())
    for name in _OURS:
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.propagate = False
        logger.setLevel(settings.log_level.upper())
    if settings.log_level != "debug":
        logging.getLogger("uvicorn").setLevel("ERROR")  # its start and malformed requests are logged by this server


def drain() -> None:
    """Write what is not written yet, before the process ends. Takes a second at most."""
    if isinstance(sys.stderr, LogStream):
        sys.stderr.drain()


def _report_dropped(lines: int) -> None:
    logging.getLogger("nanoserve").warning(
        "log lines were dropped: stderr was not read", extra={"fields": {"lines": lines}}
    )


def dropped_lines() -> int:
    """The number of log lines that were dropped because stderr was not read."""
    return sys.stderr.dropped if isinstance(sys.stderr, LogStream) else 0


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    return getattr(record, "fields", {})


def _time(record: logging.LogRecord) -> datetime:
    return datetime.fromtimestamp(record.created, UTC)


def _short(value: object) -> str:
    text = f"{value:.3f}s" if isinstance(value, float) else str(value)
    return text if text.isprintable() and " " not in text else repr(text)


@dataclass(slots=True)
class Account:
    """What a route reports about a request for the access log, through `request.state.account`."""

    prompt_tokens: int = 0  # as in usage: each prompt counts once
    outputs: Sequence[OutputState] = ()
    n: int = 1  # outputs per prompt
    user: str | None = None  # the field `user` of the request
    request_id: str | None = None  # its field `request_id`, part of the id of the answer
    finish_reasons: list[str] = field(default_factory=list)  # one for each finished output
    error: str | None = None  # only for the log
    code: str | None = None  # of an error in the response, and the field at fault
    param: str | None = None

    def fields(self) -> dict[str, Any]:
        """The fields of the log line that are known."""
        about = {name: getattr(self, name) for name in ("user", "request_id", "error", "code", "param")}
        if not self.outputs:
            return {name: value for name, value in about.items() if value is not None}
        times = [output.times for output in self.outputs]
        waits = [t.queue for t in times if t.queue is not None]
        first_tokens = [t.ttft for t in times if t.ttft is not None]
        known = {
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": sum(output.cached_tokens for output in self.outputs[:: self.n]),
            "generated_tokens": sum(output.generated for output in self.outputs),
            "queue": round(min(waits), 6) if waits else None,
            "ttft": round(min(first_tokens), 6) if first_tokens else None,
            "finish_reason": ",".join(sorted(set(self.finish_reasons))) or None,
            **about,
        }
        return {name: value for name, value in known.items() if value is not None}


class AccessLog:
    """Sets `request.state.account` and logs it, with status and duration, when the request is over."""

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
            polled = fields["path"] in _POLLED and (ended == 200 or account.code == "loading")
            access.log(logging.DEBUG if polled else logging.INFO, "request", extra={"fields": fields})


def _path(scope: Scope) -> str:
    """The path as sent, still percent-encoded, so that it cannot contain a line break. The query is not logged."""
    return bytes(scope.get("raw_path") or b"").decode("latin-1")[:_LONGEST_PATH] or str(scope["path"])[:_LONGEST_PATH]

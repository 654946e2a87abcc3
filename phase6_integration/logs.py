"""Logging to stderr, as text or as JSON, by a thread that may wait for its reader."""

import json
import logging
import os
import sys
from datetime import UTC, datetime
from logging.handlers import QueueHandler, QueueListener
from queue import Full, Queue
from typing import Any

from phase6_integration.api.settings import ServerSettings

CAPACITY = 10_000  # lines that wait to be written
DRAIN_TIMEOUT = 1.0  # seconds that the end of the process may wait for them
OURS = ("nanoserve", "phase6_integration", "uvicorn", "asyncio", "opentelemetry")


class HumanFormatter(logging.Formatter):
    """Time, level, message, and fields as name=value."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        pairs = "".join(f" {name}={_short(value)}" for name, value in _fields(record).items())
        return f"{_time(record):%H:%M:%S} {record.levelname.lower():7} {record.message}{pairs}"


class JsonFormatter(logging.Formatter):
    """One JSON object per line."""

    def format(self, record: logging.LogRecord) -> str:
        line = {"time": _time(record).isoformat(timespec="milliseconds"), "level": record.levelname.lower()}
        line |= {"logger": record.name, "message": record.getMessage(), **_fields(record)}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    return getattr(record, "fields", {})


def _time(record: logging.LogRecord) -> datetime:
    return datetime.fromtimestamp(record.created, UTC)


def _short(value: object) -> str:
    text = f"{value:.3f}s" if isinstance(value, float) else str(value)
    return text if text.isprintable() and " " not in text else repr(text)


class DroppingHandler(QueueHandler):
    """Hands records to a thread that writes them: stderr may be a pipe that nothing reads, and a write to it would stop
    the event loop. What finds no place in the queue is dropped and counted."""

    dropped = 0  # lines

    def enqueue(self, record: logging.LogRecord) -> None:
        try:
            self.queue.put_nowait(record)
        except Full:
            DroppingHandler.dropped += 1


_lines = Queue[Any](CAPACITY)


def configure(settings: ServerSettings) -> None:
    """Log to stderr in the settings' format and level. Other libraries' loggers are left alone."""
    handler = DroppingHandler(_lines)
    handler.setFormatter(JsonFormatter() if settings.log_format == "json" else HumanFormatter())
    for logger in map(logging.getLogger, OURS):
        logger.handlers = [handler]
        logger.propagate = False
        logger.setLevel(settings.log_level.upper())
    if settings.log_level != "debug":
        logging.getLogger("uvicorn").setLevel("ERROR")  # its start and malformed requests are logged by this server
    QueueListener(_lines, logging.StreamHandler(sys.stderr)).start()


def drain() -> None:
    """Write the remaining lines before the process ends. If that takes too long, nothing reads it, and no other
    write may wait either."""
    with _lines.all_tasks_done:
        if not _lines.all_tasks_done.wait_for(lambda: not _lines.unfinished_tasks, DRAIN_TIMEOUT):
            os.set_blocking(sys.stderr.fileno(), False)

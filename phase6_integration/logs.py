"""Logging to stderr, as logfmt or JSON, by a thread that may wait for its reader."""

import json
import logging
import os
import re
import sys
from datetime import UTC, datetime
from logging.handlers import QueueHandler, QueueListener
from queue import Full, Queue
from typing import Any

from phase6_integration.api.settings import ServerSettings

CAPACITY = 10_000  # lines that wait to be written
DRAIN_TIMEOUT = 1.0  # seconds that the end of the process may wait for them
OURS = ("nanoserve", "phase6_integration", "uvicorn", "asyncio", "opentelemetry")


class JsonFormatter(logging.Formatter):
    """One JSON object per line."""

    def format(self, record: logging.LogRecord) -> str:
        return json.dumps(self.line(record), default=str)

    def line(self, record: logging.LogRecord) -> dict[str, Any]:
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line = {"time": time, "level": record.levelname.lower(), "logger": record.name, "message": record.getMessage()}
        line |= getattr(record, "fields", {})
        return line | ({"exception": self.formatException(record.exc_info)} if record.exc_info else {})


class LogfmtFormatter(JsonFormatter):
    """The same as name=value, all on one line."""

    def format(self, record: logging.LogRecord) -> str:
        return pairs(self.line(record))


def pairs(fields: dict[str, Any]) -> str:
    """Fields as name=value. A value that is empty, not printable, or has spaces, quotes or `=` is quoted as in JSON."""
    texts = {name: f"{value:.3f}s" if isinstance(value, float) else str(value) for name, value in fields.items()}
    plain = {name for name, text in texts.items() if text.isprintable() and re.fullmatch('[^ ="]+', text)}
    return " ".join(f"{name}={text if name in plain else json.dumps(text)}" for name, text in texts.items())


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


def configure(settings: ServerSettings, formatter: logging.Formatter | None = None) -> None:
    """Log to stderr in the settings' format and level; `human` is a formatter of the caller's. Other libraries' loggers
    are left alone."""
    if settings.log_format == "human" and formatter is None:
        raise ValueError("log_format='human' is the command line's; in a program it is 'logfmt' or 'json'")
    handler = DroppingHandler(_lines)
    handler.setFormatter(formatter or (JsonFormatter() if settings.log_format == "json" else LogfmtFormatter()))
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

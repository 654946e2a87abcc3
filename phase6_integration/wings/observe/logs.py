"""Logging to a stderr that never blocks, as text or as JSON."""

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Any

from phase6_integration.api.settings import ServerSettings
from phase6_integration.process.log_stream import LogStream

OURS = ("nanoserve", "phase6_integration", "uvicorn", "asyncio")


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


def configure(settings: ServerSettings) -> None:
    """Log to stderr, which never blocks from here on, in the format and from the level of the settings. Loggers of
    other libraries are left alone."""
    ours = logging.getLogger("nanoserve")
    dropped = "log lines were dropped: stderr was not read"
    sys.stderr = LogStream(sys.stderr.fileno(), lambda lines: ours.warning(dropped, extra={"fields": {"lines": lines}}))
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if settings.log_format == "json" else HumanFormatter())
    for logger in map(logging.getLogger, OURS):
        logger.handlers = [handler]
        logger.propagate = False
        logger.setLevel(settings.log_level.upper())
    if settings.log_level != "debug":
        logging.getLogger("uvicorn").setLevel("ERROR")  # its start and malformed requests are logged by this server


def drain() -> None:
    """Write what is not written yet, before the process ends. Takes a second at most."""
    if isinstance(sys.stderr, LogStream):
        sys.stderr.drain()


def dropped_lines() -> int:
    """The number of log lines that were dropped because stderr was not read."""
    return sys.stderr.dropped if isinstance(sys.stderr, LogStream) else 0

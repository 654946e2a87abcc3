"""Logging to a stderr that never blocks, as text or as JSON."""

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Any

from phase6_integration.api.settings import ServerSettings
from phase6_integration.process.log_stream import LogStream

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

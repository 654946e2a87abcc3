"""Logs: lines for people, or JSON for machines. uvicorn's own lines come in the same form."""

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Any

from phase6_integration.server.settings import ServerSettings

_OURS = ("nanoserve", "phase6_integration", "uvicorn", "asyncio")


class HumanFormatter(logging.Formatter):
    """Time, level, message; what belongs to it as name=value."""

    def format(self, record: logging.LogRecord) -> str:
        pairs = "".join(f" {name}={_short(value)}" for name, value in _fields(record).items())
        line = f"{_time(record):%H:%M:%S} {record.levelname.lower():7} {record.getMessage()}{pairs}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class JsonFormatter(logging.Formatter):
    """One object a line."""

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
    """To stderr, in the form and from the level that the settings name. Others' loggers are left alone."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if settings.log_format == "json" else HumanFormatter())
    for name in _OURS:
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.propagate = False
        logger.setLevel(settings.log_level.upper())
    if settings.log_level != "debug":
        logging.getLogger("uvicorn").setLevel("ERROR")  # that it starts, and what is no HTTP, is said in our own words


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    return getattr(record, "fields", {})


def _time(record: logging.LogRecord) -> datetime:
    return datetime.fromtimestamp(record.created, UTC)


def _short(value: object) -> str:
    text = f"{value:.3f}s" if isinstance(value, float) else str(value)
    return text if text.isprintable() and " " not in text else repr(text)

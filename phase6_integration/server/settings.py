"""ServerSettings: what the HTTP front is told, once, before it starts. The engine's side is EngineOptions."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

LogLevel = Literal["debug", "info", "warning", "error"]
LogFormat = Literal["human", "json"]
LOG_LEVELS: tuple[LogLevel, ...] = ("debug", "info", "warning", "error")
LOG_FORMATS: tuple[LogFormat, ...] = ("human", "json")

_NAME = re.compile(r"[!-~]{1,256}")  # printable ASCII without spaces


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """Limits and names of the front. A bad value is a ValueError that names the field and what is allowed."""

    host: str = "127.0.0.1"
    port: int = 8000  # 0: any free one
    served_model_names: tuple[str, ...] = ("tiny_chat",)  # the first is the one that answers carry
    api_keys: tuple[str, ...] = field(default=(), repr=False)  # none: no key is asked for
    max_body_bytes: int = 4 << 20
    max_header_bytes: int = 32 << 10  # names and values of one request together
    max_headers: int = 100
    max_choices: int = 128  # n x prompts of one request
    max_messages: int = 1024
    max_logprobs: int = 20
    chat_template: str | None = None  # Jinja text; None: the model's own
    keepalive: float = 15.0  # seconds of silence in a stream before a comment is sent
    send_timeout: float = 30.0  # seconds a client may leave what it was sent unread
    receive_timeout: float = 30.0  # seconds a client may take to send its body
    idle_timeout: float = 65.0  # seconds a connection is kept between two requests
    template_timeout: float = 2.0  # seconds a chat template may take to render
    shutdown_timeout: float = 30.0  # seconds running requests are given to finish
    log_level: LogLevel = "info"
    log_format: LogFormat = "human"

    def __post_init__(self) -> None:
        _within("port", self.port, 0, 65535)
        for name in ("max_body_bytes", "max_header_bytes", "max_headers", "max_choices", "max_messages"):
            _within(name, getattr(self, name), 1, 1 << 40)
        _within("max_logprobs", self.max_logprobs, 0, 1 << 20)
        for name in ("keepalive", "send_timeout", "receive_timeout", "idle_timeout", "template_timeout"):
            _seconds(name, getattr(self, name), zero=False)
        _seconds("shutdown_timeout", self.shutdown_timeout, zero=True)
        if not self.host:
            raise ValueError("host must not be empty: give an address, e.g. 127.0.0.1")
        _names(self.served_model_names)
        if any(not _NAME.fullmatch(key) for key in self.api_keys):
            raise ValueError("an API key must be 1 to 256 printable ASCII characters without spaces")
        if self.log_level not in LOG_LEVELS:
            raise ValueError(f"log_level is {self.log_level!r}: choose one of {', '.join(LOG_LEVELS)}")
        if self.log_format not in LOG_FORMATS:
            raise ValueError(f"log_format is {self.log_format!r}: choose one of {', '.join(LOG_FORMATS)}")

    @property
    def model_name(self) -> str:
        """The name that answers and metrics carry."""
        return self.served_model_names[0]


def _within(name: str, value: int, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ValueError(f"{name} is {value!r}: it must be a whole number from {low} to {high}")


def _seconds(name: str, value: float, zero: bool) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ValueError(f"{name} is {value!r}: it must be a finite number of seconds")
    if value < 0 or (value == 0 and not zero):
        raise ValueError(f"{name} is {value!r}: it must be {'0 or more' if zero else 'more than 0'} seconds")


def _names(names: Sequence[str]) -> None:
    if not names:
        raise ValueError("served_model_names is empty: give at least one name")
    for name in names:
        if not name or len(name) > 256 or not name.isprintable():
            raise ValueError(f"served_model_names has {name!r}: a name is 1 to 256 printable characters")

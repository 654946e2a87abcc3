"""ServerSettings: the options of the HTTP server. Those of the engine are EngineOptions."""

import re
from dataclasses import dataclass, field

from phase0_request.params import MAX_LOGPROBS
from phase2_prefill_decode.fields import ConfigError, integer, number, one_of

LOG_LEVELS = ("debug", "info", "warning", "error")
LOG_FORMATS = ("human", "json")
MOST = 1 << 30

_NAME = re.compile(r"[!-~]{1,256}")  # printable ASCII without spaces


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """Limits and names of the HTTP server. A bad value is a ConfigError that names the field and the allowed values."""

    host: str = "127.0.0.1"
    port: int = 8000  # 0: any free one
    served_model_names: tuple[str, ...] = ("tiny_chat",)  # responses carry the first
    api_keys: tuple[str, ...] = field(default=(), repr=False)  # empty: no key is needed
    max_body_bytes: int = 4 << 20
    max_header_bytes: int = 32 << 10  # names and values of one request together
    max_headers: int = 100
    max_choices: int = 128  # n x prompts of one request
    max_messages: int = 1024
    max_logprobs: int = MAX_LOGPROBS
    max_scores: int = 1 << 20  # prompt logprobs of one request, alternatives included
    chat_template: str | None = None  # Jinja text; None: the model's own
    keepalive: float = 15.0  # seconds of silence in a stream before a comment is sent
    send_timeout: float = 30.0  # seconds a client may read nothing
    receive_timeout: float = 60.0  # seconds a client may take to send a request
    idle_timeout: float = 65.0  # seconds a connection may be idle between two requests
    template_timeout: float = 2.0  # seconds a chat template may take to render
    shutdown_timeout: float = 25.0  # seconds running requests may take to finish; supervisors often kill after 30
    log_level: str = "info"
    log_format: str = "human"

    def __post_init__(self) -> None:
        if not self.host:
            raise ConfigError("host must be an address or a name, such as 127.0.0.1, got nothing")
        integer("port", self.port, 0, 65535)
        for name in ("max_body_bytes", "max_header_bytes", "max_headers", "max_choices", "max_messages", "max_scores"):
            integer(name, getattr(self, name), 1, MOST)
        integer("max_logprobs", self.max_logprobs, 0, MAX_LOGPROBS)
        for name in ("keepalive", "send_timeout", "receive_timeout", "idle_timeout", "template_timeout"):
            number(name, getattr(self, name), 0, open_below=True)
        number("shutdown_timeout", self.shutdown_timeout, 0)
        if not self.served_model_names or not all(map(_NAME.fullmatch, self.served_model_names)):
            raise ConfigError("served_model_names must be names of 1 to 256 printable ASCII characters without spaces")
        if not all(map(_NAME.fullmatch, self.api_keys)):  # the key itself is not repeated: it would be logged
            raise ConfigError("an API key must have 1 to 256 printable ASCII characters without spaces")
        one_of("log_level", self.log_level, LOG_LEVELS)
        one_of("log_format", self.log_format, LOG_FORMATS)

    @property
    def model_name(self) -> str:
        """The name in responses and metrics."""
        return self.served_model_names[0]

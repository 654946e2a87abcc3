"""ServerSettings: the settings of the HTTP server, checked once. Those of the engine are EngineOptions."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from phase0_request.params import MAX_LOGPROBS
from phase0_request.support.checks import ConfigError, check_bool, check_choice, check_int, check_number
from phase6_integration.engine.options import at_least, check_fields, option, positive, text, texts

LOG_LEVELS = ("debug", "info", "warning", "error")
LOG_FORMATS = ("human", "json")
TOOL_PARSERS = ("hermes", "llama3_json", "mistral", "none")
REASONING_PARSERS = ("deepseek_r1", "qwen3", "none")
LOCAL_HOSTS = ("localhost", "*.localhost")
NAME = "[!-~]{1,256}"  # printable ASCII without spaces
_names = texts("names of 1 to 256 printable ASCII characters without spaces", NAME)
_path = text("a path")
_port = partial(check_int, low=0, high=65535)
_root = text("a path such as /llm, without a slash at its end", "(/[A-Za-z0-9._~-]{1,128}){1,16}")
_hosts = texts("names such as llm.example.com, *.example.com, or * for all", NAME)
_origins = texts("origins such as https://chat.example.com, or * for all", r"\*|[a-z][a-z0-9+.-]*://[!-.0-~]{1,256}")


def _collector(name: str, value: str) -> None:
    text("a URL such as http://127.0.0.1:4318/v1/traces", r"https?://\S+")(name, value)
    if find_spec("opentelemetry.sdk") is None:
        raise ConfigError(f"{name} needs OpenTelemetry's SDK: pip install 'nano-serving[otel]'")


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """Limits and names of the server. A wrong value raises a ValueError that names the field and what is allowed."""

    host: str = option("127.0.0.1", "address to listen on", "ADDRESS", text("an address or a name, such as 127.0.0.1"))
    port: int = option(8000, "port to listen on; 0: any free one, which the log names", "PORT", _port)
    uds: str | None = option(None, "Unix socket to listen on, in place of a host and a port (none)", "PATH", _path)
    root_path: str | None = option(
        None, "path under which a proxy passes the server on, such as /llm (none)", "PATH", _root
    )
    ssl_certfile: str | None = option(None, "TLS certificate and its chain, in PEM (none)", "FILE", _path)
    ssl_keyfile: str | None = option(None, "its key (in the file of the certificate)", "FILE", _path)
    ssl_ca_certs: str | None = option(None, "CA certificates that sign those of clients (none)", "FILE", _path)
    ssl_cert_reqs: int = option(
        0, "certificates of clients: 0 none, 1 optional, 2 required", check=partial(check_int, low=0, high=2)
    )
    served_model_names: tuple[str, ...] = ("tiny_chat",)  # responses carry the first
    api_keys: tuple[str, ...] = field(default=(), repr=False)  # none: no key is required
    api_key_file: str | None = option(None, "API keys, one on each line (none)", "FILE", _path)
    allowed_hosts: tuple[str, ...] = option(
        (),
        "names in Host headers, such as *.example.com (localhost, if it listens on a loopback address; else any)",
        "NAME",
        _hosts,
    )
    allowed_origins: tuple[str, ...] = option(
        (),
        "of web pages that may use the server, such as https://chat.example.com, or * for all (none)",
        "ORIGIN",
        _origins,
    )
    clip_max_tokens: bool = option(
        False, "cut max_tokens to what the context has left, instead of a 400", check=check_bool
    )
    max_body_bytes: int = option(4 << 20, "largest request body; more is a 413", "BYTES", at_least(1))
    max_buffered_bytes: int = option(
        1 << 30, "memory for bodies and unsent answers; more is a 503", "BYTES", partial(check_int, low=1, high=1 << 50)
    )
    max_header_bytes: int = option(32 << 10, "largest request header; more is a 431", "BYTES", at_least(1))
    max_headers: int = 100
    max_choices: int = option(128, "most choices of one request: prompts times n", check=at_least(1))
    max_logprobs: int = option(
        MAX_LOGPROBS, "most alternatives per token", check=partial(check_int, low=0, high=MAX_LOGPROBS)
    )
    allow_unknown_fields: bool = option(
        False, "ignore unknown fields of requests, with a warning for each", check=check_bool
    )
    request_timeout: float = option(
        1800.0, "from arrival to the end of a request; then a 408; 0: no limit", "SECONDS", partial(check_number, low=0)
    )
    generation_config: str = option(
        "auto",
        "sampling defaults: auto: the model's generation_config.json; vllm: none; or a directory that has such a file",
        "SOURCE",
        _path,
    )
    override_generation_config: Mapping[str, Any] | None = option(
        None, "JSON object of sampling defaults that replace those, such as '{\"temperature\": 0.6}' (none)", "JSON"
    )
    sampling_defaults: Mapping[str, Any] = field(default_factory=dict)  # what the two come to: `serve` fills it in
    enable_auto_tool_choice: bool = option(
        True, "look for tool calls in answers with tool_choice auto", check=check_bool
    )
    tool_call_parser: str | None = option(
        None,
        f"how the model writes tool calls: {', '.join(TOOL_PARSERS)} (by its chat template)",
        "NAME",
        partial(check_choice, allowed=TOOL_PARSERS),
    )
    reasoning_parser: str | None = option(
        None,
        f"how it writes its reasoning: {', '.join(REASONING_PARSERS)} (by its chat template)",
        "NAME",
        partial(check_choice, allowed=REASONING_PARSERS),
    )
    chat_template: str | None = None  # Jinja text; None: the model's own
    playground_text: bool | None = option(
        None,
        "show the text of all requests to those who watch the engine on the page at / (on, if nobody else can: without "
        "keys, on a loopback address)",
        check=check_bool,
    )
    keepalive: float = option(15.0, "of silence in a stream before a comment is sent", "SECONDS", positive)
    send_timeout: float = option(30.0, "a client may leave sent data unread", "SECONDS", positive)
    receive_timeout: float = option(60.0, "a client may take to send a request", "SECONDS", positive)
    idle_timeout: float = 65.0  # seconds a connection is kept open between two requests
    shutdown_timeout: float = option(  # all waits together stay below 30 seconds, after which Kubernetes kills
        20.0, "that running requests may take after SIGTERM", "SECONDS", partial(check_number, low=0)
    )
    otlp_traces_endpoint: str | None = option(
        None,
        "of a collector, such as http://127.0.0.1:4318/v1/traces: a span for each request (none)",
        "URL",
        _collector,
    )
    log_level: str = option("info", ", ".join(LOG_LEVELS), "LEVEL", partial(check_choice, allowed=LOG_LEVELS))
    log_format: str = option("human", " or ".join(LOG_FORMATS), "FORMAT", partial(check_choice, allowed=LOG_FORMATS))

    def __post_init__(self) -> None:
        check_fields(self)
        at_least(1)("max_headers", self.max_headers)
        positive("idle_timeout", self.idle_timeout)
        _names("served_model_names", self.served_model_names or ("",))
        check_keys(self.api_keys)
        for name in ("ssl_keyfile", "ssl_ca_certs", "ssl_cert_reqs"):
            if getattr(self, name) and self.ssl_certfile is None:
                raise ConfigError(f"{name} is for TLS, which needs ssl_certfile")
        if bool(self.ssl_ca_certs) != bool(self.ssl_cert_reqs):
            raise ConfigError("ssl_ca_certs needs ssl_cert_reqs 1 or 2, and they need ssl_ca_certs")

    @property
    def model_name(self) -> str:
        """The name in responses and metrics."""
        return self.served_model_names[0]


def check_keys(keys: Sequence[str]) -> tuple[str, ...]:
    if not all(map(partial(re.fullmatch, NAME), keys)):  # the message must not repeat a key
        raise ConfigError("an API key must have 1 to 256 printable ASCII characters without spaces")
    return tuple(keys)


def read_keys(file: str | Path) -> tuple[str, ...]:
    """The keys in a file, one on each line. Empty lines and those that begin with # are left out. A file without keys
    is an error: it would open the server to all."""
    try:
        lines = [line.strip() for line in Path(file).read_text("utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ConfigError(f"cannot read the API keys in {file}: {reason}") from None
    keys = check_keys([line for line in lines if line and not line.startswith("#")])
    if not keys:
        raise ConfigError(f"{file} holds no API key: write one on each line")
    return keys


def is_address(host: str) -> bool:
    try:
        ip_address(host)
    except ValueError:
        return False
    return True


def default_hosts(host: str) -> tuple[str, ...]:
    """The names that a server answers to, if it listens on a loopback address; otherwise it does not check them."""
    local = ip_address(host).is_loopback if is_address(host) else host == "localhost"
    return LOCAL_HOSTS if local else ()

"""ServerSettings: the settings of the HTTP server, checked once. Extras have their own."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from ipaddress import ip_address
from typing import Any, TypeVar

from phase0_request.support.checks import check_bool, check_choice, check_int, check_number
from phase0_request.support.options import at_least, check_fields, chosen, option, positive, text, texts

T = TypeVar("T")
LOG_LEVELS = ("debug", "info", "warning", "error")
FORMATS = "human, logfmt or json (human on a terminal, logfmt elsewhere)"
LOCAL_HOSTS = ("localhost", "*.localhost")
API_KEYS = ("NANOSERVE_API_KEY", "VLLM_API_KEY")  # environment variables
NAME = "[!-~]{1,256}"  # printable ASCII without spaces
_names = texts("names of 1 to 256 printable ASCII characters without spaces", NAME)
_path = text("a path")
_port = partial(check_int, low=0, high=65535)
_root = text("a path such as /llm, without a slash at its end", "(/[A-Za-z0-9._~-]{1,128}){1,16}")
_hosts = texts("names such as llm.example.com, *.example.com, or * for all", NAME)


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """Limits and names of the server. A wrong value raises a ValueError that names the field and the allowed values."""

    host: str = option("127.0.0.1", "address to listen on", "ADDRESS", text("an address or a name, such as 127.0.0.1"))
    port: int = option(8000, "port to listen on; 0: any free one, which the log names", "PORT", _port)
    uds: str | None = option(None, "Unix socket to listen on, in place of a host and a port (none)", "PATH", _path)
    root_path: str | None = option(
        None, "path under which a proxy passes the server on, such as /llm (none)", "PATH", _root
    )
    served_model_names: tuple[str, ...] = ("tiny_chat",)  # responses carry the first
    allowed_hosts: tuple[str, ...] = option(
        (),
        "names in Host headers, such as *.example.com (localhost, if it listens on a loopback address; else any)",
        "NAME",
        _hosts,
    )
    clip_max_tokens: bool = option(
        False, "cut max_tokens to what the context has left, instead of a 400", check=check_bool
    )
    max_body_bytes: int = option(4 << 20, "largest request body; more is a 413", "BYTES", at_least(1))
    max_choices: int = option(128, "most choices of one request: prompts times n", check=at_least(1))
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
    chat_template: str | None = None  # Jinja text; None: the model's own
    keepalive: float = option(15.0, "of silence in a stream before a comment is sent", "SECONDS", positive)
    idle_timeout: float = 65.0  # seconds a connection is kept open between two requests
    shutdown_timeout: float = option(  # all waits together stay below 30 seconds, after which Kubernetes kills
        20.0, "that running requests may take after SIGTERM", "SECONDS", partial(check_number, low=0)
    )
    log_level: str = option("info", ", ".join(LOG_LEVELS), "LEVEL", partial(check_choice, allowed=LOG_LEVELS))
    log_format: str | None = option(None, FORMATS, "FORMAT", partial(check_choice, allowed=("human", "logfmt", "json")))

    more: Mapping[str, Any] = field(default_factory=dict, repr=False)  # settings of extras: `connect.settings` fills it

    def __post_init__(self) -> None:
        check_fields(self)
        positive("idle_timeout", self.idle_timeout)
        _names("served_model_names", self.served_model_names or ("",))

    def of(self, extra: type[T]) -> T:
        """The settings of an extra, as its dataclass."""
        return chosen(extra, self.more)

    @property
    def model_name(self) -> str:
        """The name in responses and metrics."""
        return self.served_model_names[0]


def is_address(host: str) -> bool:
    try:
        ip_address(host)
    except ValueError:
        return False
    return True


def default_hosts(host: str) -> tuple[str, ...]:
    """The names that a server on a loopback address answers to; other servers do not check names."""
    local = ip_address(host).is_loopback if is_address(host) else host == "localhost"
    return LOCAL_HOSTS if local else ()

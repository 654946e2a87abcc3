"""The settings of the edge: TLS, API keys, origins, and limits on what clients may send and leave unread."""

import re
from argparse import _ActionsContainer
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from phase0_request.support.checks import ConfigError, check_int
from phase0_request.support.options import at_least, check_fields, option, positive, text, texts
from phase6_integration.api.settings import API_KEYS, NAME

_path = text("a path")
_origins = texts("origins such as https://chat.example.com, or * for all", r"\*|[a-z][a-z0-9+.-]*://[!-.0-~]{1,256}")


@dataclass(frozen=True, slots=True, kw_only=True)
class EdgeSettings:
    ssl_certfile: str | None = option(None, "TLS certificate and its chain, in PEM (none)", "FILE", _path)
    ssl_keyfile: str | None = option(None, "its key (in the file of the certificate)", "FILE", _path)
    ssl_ca_certs: str | None = option(None, "CA certificates that sign those of clients (none)", "FILE", _path)
    ssl_cert_reqs: int = option(
        0, "certificates of clients: 0 none, 1 optional, 2 required", check=partial(check_int, low=0, high=2)
    )
    api_keys: tuple[str, ...] = field(default=(), repr=False)  # none: no key is required
    api_key_file: str | None = option(None, "API keys, one on each line (none)", "FILE", _path)
    allowed_origins: tuple[str, ...] = option(
        (),
        "of web pages that may use the server, such as https://chat.example.com, or * for all (none)",
        "ORIGIN",
        _origins,
    )
    max_buffered_bytes: int = option(
        1 << 30, "memory for bodies and unsent answers; more is a 503", "BYTES", partial(check_int, low=1, high=1 << 50)
    )
    max_header_bytes: int = option(32 << 10, "largest request header; more is a 431", "BYTES", at_least(1))
    max_headers: int = field(default=100, metadata={"check": at_least(1)})
    send_timeout: float = option(30.0, "a client may leave sent data unread", "SECONDS", positive)
    receive_timeout: float = option(60.0, "a client may take to send a request", "SECONDS", positive)

    def __post_init__(self) -> None:
        check_fields(self)
        check_keys(self.api_keys)
        for name in ("ssl_keyfile", "ssl_ca_certs", "ssl_cert_reqs"):
            if getattr(self, name) and self.ssl_certfile is None:
                raise ConfigError(f"{name} is for TLS, which needs ssl_certfile")
        if bool(self.ssl_ca_certs) != bool(self.ssl_cert_reqs):
            raise ConfigError("ssl_ca_certs needs ssl_cert_reqs 1 or 2, and they need ssl_ca_certs")


def add_key_flag(group: _ActionsContainer) -> None:
    help = f"a client's key; repeatable, but visible in ps; also from {' and '.join(API_KEYS)} (none is needed)"
    group.add_argument("--api-key", action="append", metavar="KEY", help=help)


def keys_of(given: Mapping[str, Any], environment: Mapping[str, str]) -> tuple[str, ...]:
    """The API keys from flags and the environment, or from a file."""
    keys = (*given.get("api_key", ()), *(environment[name] for name in API_KEYS if environment.get(name)))
    if "api_key_file" not in given:
        return keys
    if keys:
        raise ValueError(f"API keys come from --api-key-file, or from --api-key and {API_KEYS[0]}: not from both")
    return read_keys(given["api_key_file"])


def check_keys(keys: Sequence[str]) -> tuple[str, ...]:
    if not all(map(partial(re.fullmatch, NAME), keys)):  # the message must not repeat a key
        raise ConfigError("an API key must have 1 to 256 printable ASCII characters without spaces")
    return tuple(keys)


def read_keys(file: str | Path) -> tuple[str, ...]:
    """The keys in a file, one per line. Empty lines and comments (#) are skipped. A file without keys is an error,
    since it would open the server to everyone."""
    try:
        lines = [line.strip() for line in Path(file).read_text("utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ConfigError(f"cannot read the API keys in {file}: {reason}") from None
    keys = check_keys([line for line in lines if line and not line.startswith("#")])
    if not keys:
        raise ConfigError(f"{file} holds no API key: write one on each line")
    return keys

"""What the commands share: flags for sampling and of a server, HTTP errors."""

import argparse
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any, get_type_hints
from urllib.parse import urlsplit

from phase0_request.support.flags import whole_number
from phase6_integration.api.settings import API_KEYS

if TYPE_CHECKING:
    import httpx2


SAMPLING = {
    "max_tokens": ("N", "most tokens of an answer"),
    "temperature": ("T", "0: always the most likely token"),
    "top_p": ("P", "sample from the most likely tokens of this total probability"),
    "top_k": ("K", "sample from this many of the most likely tokens; 0: from all"),
    "seed": ("N", "sampling seed; none: another one each time (none)"),
}
BIDIRECTIONAL = *range(0x202A, 0x202F), *range(0x2066, 0x206A)  # show what follows in another order than it has
UNPRINTABLE = dict.fromkeys((*range(9), *range(11, 32), *range(127, 160), *BIDIRECTIONAL), "\ufffd")
MAX_BODY = 1 << 24  # bytes of an answer, and of a line of a stream


def add_sampling(group: argparse._ActionsContainer, names: Sequence[str], **defaults: Any) -> None:
    """Add flags for fields of SamplingParams."""
    from phase0_request.params import SamplingParams

    known = {field.name: field.default for field in fields(SamplingParams)}
    types = get_type_hints(SamplingParams)
    for name in names:
        metavar, help = SAMPLING[name]
        default = defaults.get(name, known[name])
        shown = "" if default is None else f" ({default})"
        kind = float if types[name] is float else whole_number
        group.add_argument(f"--{name.replace('_', '-')}", type=kind, metavar=metavar, help=help + shown)


# A server.


def add_server(group: argparse._ActionsContainer, default: str | None = None) -> None:
    shown = default or "none: a local model"
    group.add_argument("--url", metavar="URL", default=default, help=f"of a server, with or without /v1 ({shown})")
    group.add_argument("--api-key", metavar="KEY", help=f"for the server ({' or '.join(API_KEYS)} in the environment)")


def server_url(url: str) -> str:
    """A server's URL as people write it, with or without http:// and /v1. ValueError if it is not an address."""
    given, url = url, url if "://" in url else f"http://{url}"
    parts = urlsplit(url)
    try:
        valid = parts.port != 0 and parts.scheme in ("http", "https") and bool(parts.hostname)
    except ValueError:
        valid = False
    if not valid or parts.username or parts.query or parts.fragment:
        raise ValueError(f"a server's URL looks like http://127.0.0.1:8000, got {given!r}")
    return url.rstrip("/").removesuffix("/v1")


def api_key(given: Mapping[str, Any]) -> str | None:
    """The key from --api-key or the environment."""
    key = given.get("api_key") or next((os.environ[name] for name in API_KEYS if os.environ.get(name)), None)
    if key is not None and not (key.isascii() and key.isprintable()):
        raise ValueError("an API key must be printable ASCII")
    return key


def http_settings(given: Mapping[str, Any]) -> dict[str, Any]:
    """Keyword arguments for an httpx2 client of the server. An answer may take any time; a connection may not."""
    import httpx2

    key = api_key(given)
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    return {"base_url": server_url(given["url"]), "headers": headers, "timeout": httpx2.Timeout(None, connect=30)}


def http_error(error: "httpx2.RequestError", url: str) -> str:
    """What to tell a user."""
    import httpx2

    if isinstance(error, httpx2.ConnectError | httpx2.ConnectTimeout):
        return f"no server answers at {server_url(url)} ({error}); is it running?"
    return f"the connection was lost: {error}"


def lines_of(response: "httpx2.Response", most: int = MAX_BODY) -> Iterator[str]:
    """The lines of a stream, as they come. ValueError if one is longer than this many bytes."""
    rest = bytearray()
    for part in response.iter_bytes():
        rest += part
        if b"\n" in part:
            *whole, rest = rest.split(b"\n")
            yield from (line.decode("utf-8", "replace").rstrip("\r") for line in whole)
        if len(rest) > most:
            raise ValueError(f"the server sent a line of more than {most} bytes")
    if rest:
        yield rest.decode("utf-8", "replace")


def body_of(response: "httpx2.Response", most: int = MAX_BODY) -> bytes:
    """The body of an answer that is streamed. ValueError if it is longer than this many bytes."""
    body = bytearray()
    for part in response.iter_bytes():
        body += part
        if len(body) > most:
            raise ValueError(f"the server sent an answer of more than {most} bytes")
    return bytes(body)


def error_message(body: bytes) -> str:
    """What a server's answer says is wrong."""
    try:
        return printable(str(json.loads(body)["error"]["message"]))
    except (ValueError, LookupError, TypeError, RecursionError):
        return "a response that is no JSON error"


def printable(text: str) -> str:
    """Text from elsewhere without control characters, which could move the cursor, ring the bell or reverse a line."""
    return text.translate(UNPRINTABLE)

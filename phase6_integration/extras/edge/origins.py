"""The Host headers that are answered, so that pages of other sites cannot use the server.

A page of any site can send requests to a server on your machine. Its browser does not let it read the answers or send
JSON unless the server allows its origin (CORS). DNS rebinding gets around that: the attacker points the page's own name
at the server, and the browser takes both for one origin. Only the Host header tells them apart.
"""

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from phase6_integration.api.errors import RequestError
from phase6_integration.api.settings import is_address


def check_host(headers: Iterable[tuple[bytes, bytes]], allowed: Sequence[str]) -> None:
    """Refuse a request whose Host is a name that is not allowed; without a list, all names are allowed. Starlette's
    TrustedHostMiddleware also refuses addresses, and its errors are not in OpenAI's format."""
    if allowed and not all(is_allowed(host_of(value), allowed) for name, value in headers if name == b"host"):
        message = "this server does not answer to this Host; --allowed-hosts names those that it does"
        raise RequestError(421, message, code="unknown_host")


def is_allowed(host: str, allowed: Sequence[str]) -> bool:
    """Addresses are always allowed: DNS does not resolve them."""
    return is_address(host) or any(fnmatchcase(host, pattern.lower()) for pattern in allowed)


def host_of(header: bytes) -> str:
    """The name or address in a Host header, without the port."""
    text = header.decode("latin-1").lower()
    return text[1:].partition("]")[0] if text.startswith("[") else text.partition(":")[0].removesuffix(".")

"""Which Host headers are answered to, so that pages of other sites cannot use the server.

A page of any site can send requests to a server on your machine. Its browser does not let it read the answers, nor send
JSON, unless the server allows its origin (CORS). There is a way around: the page's own name is made to point at the
server (DNS rebinding). The browser then takes both for one origin, and only the Host header tells them apart.
"""

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from phase6_integration.api.errors import RequestError
from phase6_integration.api.settings import is_address


def check_host(headers: Iterable[tuple[bytes, bytes]], allowed: Sequence[str]) -> None:
    """Refuse a request with a name as Host that is not allowed; without any, all names are. Starlette's
    TrustedHostMiddleware refuses addresses too, and its errors are not in OpenAI's format."""
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

"""The listening socket: a TCP port or a Unix socket, and its address for clients."""

import errno
import os
import socket
from pathlib import Path

from phase6_integration.api.settings import ServerSettings

PROBE = 1.0  # seconds for the server that may still have the Unix socket
ANY = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # an address of this machine in place of all of them


def listen(settings: ServerSettings) -> socket.socket:
    """Start to listen. OSError with the bare reason if the address is not available."""
    try:
        return _unix(Path(settings.uds)) if settings.uds is not None else _tcp(settings.host, settings.port)
    except UnicodeError:
        raise OSError("this is not the name of a host") from None
    except socket.gaierror as error:
        raise OSError(error.strerror) from None
    except OSError as error:  # its own message repeats the address
        raise OSError(os.strerror(error.errno) if error.errno else str(error)) from None


def url_of(listener: socket.socket, scheme: str) -> str:
    """The address for a client on this machine."""
    if listener.family == socket.AF_UNIX:
        return f"unix:{listener.getsockname()}"
    host, port = listener.getsockname()[:2]
    host = ANY.get(host, host)
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"


def _tcp(host: str, port: int) -> socket.socket:
    """Bind a port, any free one for 0. `::` serves IPv4 too."""
    family, *_, (address, *_) = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    both = address == "::" and socket.has_dualstack_ipv6()
    return socket.create_server((str(address), port), family=family, dualstack_ipv6=both)


def _unix(path: Path) -> socket.socket:
    """Replace the file only if a stopped server has left it there."""
    listener = socket.socket(socket.AF_UNIX)
    listener.settimeout(PROBE)
    try:
        if path.is_socket() and listener.connect_ex(str(path)) == errno.ECONNREFUSED:
            path.unlink()
        listener.bind(str(path))
        listener.listen()
    except OSError:
        listener.close()
        raise
    return listener

"""The listening socket: a TCP port or a Unix socket, and the address under which clients find it."""

import contextlib
import os
import socket
import stat
from pathlib import Path

from phase6_integration.api.settings import ServerSettings

BACKLOG = 2048  # connections that wait to be accepted
PROBE = 1.0  # seconds for the server that may still have the Unix socket
ANY = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # an address of this machine in place of all of them


class Listener:
    """Listens from the start on, until `close`. OSError with the bare reason if that is not possible."""

    def __init__(self, settings: ServerSettings) -> None:
        self._scheme = "https" if settings.ssl_certfile else "http"
        self._path = None if settings.uds is None else Path(settings.uds)
        self.socket = bind(settings.host, settings.port) if self._path is None else bind_unix(self._path)
        self._file = self._path and _identity(self._path)

    @property
    def url(self) -> str:
        """The address in the log."""
        if self._path is not None:
            return f"unix:{self._path}"
        host, port = self.socket.getsockname()[:2]
        return f"{self._scheme}://{_quoted(host)}:{port}"

    @property
    def page(self) -> str | None:
        """The address of the playground for a browser on this machine; None on a Unix socket."""
        if self._path is not None:
            return None
        host, port = self.socket.getsockname()[:2]
        return f"{self._scheme}://{_quoted(ANY.get(host, host))}:{port}/"

    def close(self) -> None:
        """Close the socket and remove its file, unless another server has taken its place."""
        self.socket.close()
        if self._path is not None:
            with contextlib.suppress(FileNotFoundError):
                if _identity(self._path) == self._file:
                    self._path.unlink()


def _identity(file: Path) -> tuple[int, int]:
    """What tells a file from another of its name. A new one may have the inode of one that is gone."""
    found = file.stat()
    return found.st_ino, found.st_mtime_ns


def _quoted(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def bind(host: str, port: int) -> socket.socket:
    """A listening socket, on any free port if that is 0; at `::` for IPv4 too. OSError with the bare reason if the
    address is not available."""
    try:
        family, *_, (address, *_) = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        both = address == "::" and socket.has_dualstack_ipv6()
        return socket.create_server((str(address), port), family=family, backlog=BACKLOG, dualstack_ipv6=both)
    except UnicodeError:
        raise OSError("this is not the name of a host") from None
    except socket.gaierror as error:
        raise OSError(error.strerror) from None
    except OSError as error:  # its own message repeats the address
        raise OSError(os.strerror(error.errno) if error.errno else str(error)) from None


def bind_unix(path: Path) -> socket.socket:
    """A listening Unix socket. The file that a server has left behind is replaced, and nothing else is."""
    listener = socket.socket(socket.AF_UNIX)
    try:
        if _is_left_behind(path):
            path.unlink()
        listener.bind(str(path))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise OSError(os.strerror(error.errno) if error.errno else str(error)) from None
    return listener


def _is_left_behind(path: Path) -> bool:
    """Whether this is a socket on which no server listens."""
    if not path.exists() or not stat.S_ISSOCK(path.stat().st_mode):
        return False
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(PROBE)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            return True
        except TimeoutError:  # it listens, and has many connections waiting
            return False
    return False

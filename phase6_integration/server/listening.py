"""Listening: a port to be found at, and room for all who come to it."""

import contextlib
import logging
import os
import socket
import sys

BACKLOG = 2048  # connections that wait to be accepted

logger = logging.getLogger("nanoserve")


def bind(host: str, port: int) -> socket.socket:
    """A socket that listens there, on any free port if that is 0; at `::`, for both kinds of addresses. OSError, with
    the reason alone, if the address is not to be had."""
    try:
        family, *_, (address, *_) = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        both = address == "::" and socket.has_dualstack_ipv6()
        return socket.create_server((str(address), port), family=family, backlog=BACKLOG, dualstack_ipv6=both)
    except UnicodeError:
        raise OSError("this is not the name of a host") from None
    except socket.gaierror as error:
        raise OSError(error.strerror) from None
    except OSError as error:  # whose own words say the address once more
        raise OSError(os.strerror(error.errno) if error.errno else str(error)) from None


def more_files() -> None:
    """Let this process have as many files open as it may. Each connection is one, and shells often allow few; those
    beyond are closed, and nobody says so."""
    if sys.platform == "win32":
        return
    import resource

    before, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # macOS has no number for its most
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    now, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    logger.debug("files that may be open", extra={"fields": {"before": before, "now": now}})

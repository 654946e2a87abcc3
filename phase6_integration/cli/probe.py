"""Asks a server on this machine how it is.

`python -m phase6_integration.cli.probe` is the health check of the container: it asks the server of process 1, at the
address that the flags of that process name, or at 127.0.0.1:8000 if it is another program. The exit code is 0 if it
serves requests, else 1.
"""

import socket
import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException
from pathlib import Path

from phase6_integration.api.settings import ServerSettings
from phase6_integration.cli.serve_command import add_flags
from phase6_integration.engine.flags import Parser, values_of
from phase6_integration.wings.edge.listener import ANY

PATIENCE = 4.0  # seconds for each wait; the Dockerfile allows 5 in all
LONGEST = 1 << 16  # bytes of an answer that are read
PROCESS = Path("/proc/1/cmdline")


@dataclass(frozen=True, slots=True)
class Address:
    """Where a server listens."""

    host: str = "127.0.0.1"
    port: int = 8000
    uds: str | None = None
    tls: bool = False
    asks_for_certificate: bool = False

    @classmethod
    def of(cls, arguments: Sequence[str]) -> "Address":
        """The address of `nanoserve serve` with these arguments."""
        parser = Parser(prog="nanoserve serve")
        add_flags(parser)
        settings = ServerSettings(**values_of(ServerSettings, vars(parser.parse_args(arguments))))
        host = ANY.get(settings.host, settings.host)
        return cls(host, settings.port, settings.uds, settings.ssl_certfile is not None, settings.ssl_cert_reqs == 2)

    def get(self, path: str, patience: float = PATIENCE) -> tuple[int, bytes]:
        """The status and the body of an answer. OSError or HTTPException if there is none."""
        with self._connect(patience) as end:
            connection = HTTPConnection("127.0.0.1")  # as Host: servers answer to addresses whatever names they have
            connection.sock = end
            connection.request("GET", path)
            response = connection.getresponse()
            return response.status, response.read(LONGEST)

    def _connect(self, patience: float) -> socket.socket:
        if self.uds is not None:
            end = socket.socket(socket.AF_UNIX)
            end.settimeout(patience)
            end.connect(self.uds)
        else:
            end = socket.create_connection((self.host, self.port), patience)
        if not self.tls:
            return end
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # nothing secret is sent
        return context.wrap_socket(end)


def main(process: Path = PROCESS) -> int:
    words = process.read_text("utf-8", "surrogateescape").split("\0")
    try:
        address = Address.of(words[words.index("serve") + 1 : -1]) if "serve" in words else Address()
        status, body = address.get("/health")
    except ValueError as error:
        print(f"its configuration cannot be read: {error}")
        return 1
    except (OSError, HTTPException) as error:
        refused = isinstance(error, ssl.SSLError | ConnectionResetError) and address.asks_for_certificate
        print("it asks for a certificate, and nothing more can be seen without" if refused else f"no answer: {error}")
        return 0 if refused else 1
    print(status, body.decode("utf-8", "replace"))
    return 0 if status == 200 else 1


if __name__ == "__main__":
    raise SystemExit(main())

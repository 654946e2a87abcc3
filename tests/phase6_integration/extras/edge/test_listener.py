"""Where a server listens: a Unix socket, TLS, a path behind a proxy."""

import asyncio
import contextlib
import signal
import socket
import ssl
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import httpx2
import pytest

from phase6_integration import connect
from phase6_integration.api.settings import ServerSettings
from phase6_integration.listener import listen, url_of
from tests.phase6_integration.fake_engine import FakeEngine, client
from tests.phase6_integration.life import PATIENCE, Life, life, logfmt, started

BODY = {"prompt": "a", "max_tokens": 4, "stream": True}


class Pair(NamedTuple):
    certificate: Path
    key: Path


def certificate(folder: Path, name: str) -> Pair:
    """A certificate that signs itself, for this machine."""
    pair = Pair(folder / f"{name}.pem", folder / f"{name}.key")
    names = "/CN=localhost -addext subjectAltName=DNS:localhost,IP:127.0.0.1"
    where = f"-keyout {pair.key} -out {pair.certificate}"
    made = f"req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj {names} {where}"
    subprocess.run(["openssl", *made.split()], check=True, capture_output=True)
    return pair


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return certificate(tmp_path_factory.mktemp("tls"), "server")


# A Unix socket.


@contextmanager
def on_a_socket(path: Path) -> Iterator[Life]:
    server = Life(started("--uds", str(path), port=None, scripted=True))
    try:
        yield server
    finally:
        server.process.kill()
        server.close()


def test_a_unix_socket_serves_and_is_gone_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with on_a_socket(path) as server:
        assert server.until(r"listening url=(\S+)")[1] == f"unix:{path}"
        server.signal(signal.SIGUSR1)
        server.until("ready")
        with httpx2.Client(transport=httpx2.HTTPTransport(uds=str(path)), timeout=PATIENCE) as http:
            assert http.get("http://any.name/v1/models").status_code == 200
            server.signal(signal.SIGUSR1)
            assert http.post("http://localhost/v1/completions", json=BODY).text.endswith("data: [DONE]\n\n")
        server.signal(signal.SIGTERM)
        assert server.ended() == 0
    assert not path.exists()


def test_a_socket_in_use_is_refused_and_one_left_behind_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "s"
    settings = ServerSettings(uds=str(path))
    first = listen(settings)
    with pytest.raises(OSError, match=r"^Address already in use$"):
        listen(settings)
    first.close()  # as a server that was killed leaves it
    with listen(settings), socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(path))


def test_a_file_that_is_no_socket_is_kept(tmp_path: Path) -> None:
    file = tmp_path / "s"
    file.write_text("mine")
    with pytest.raises(OSError, match=r"^Address already in use$"):
        listen(ServerSettings(uds=str(file)))
    assert file.read_text() == "mine"


def test_the_address_in_the_log_is_one_that_a_browser_can_open() -> None:
    for host in ("127.0.0.1", "0.0.0.0"):
        with listen(ServerSettings(host=host, port=0)) as listener:
            assert url_of(listener, "http") == f"http://127.0.0.1:{listener.getsockname()[1]}"


# TLS.


def test_tls_serves_and_streams(pair: Pair) -> None:
    with life("--ssl-certfile", str(pair.certificate), "--ssl-keyfile", str(pair.key), scripted=True) as server:
        url = server.until(r"listening url=(https://127.0.0.1:\d+) ")[1]
        server.signal(signal.SIGUSR1)
        server.until("ready")
        server.signal(signal.SIGUSR1)
        trusted = ssl.create_default_context(cafile=str(pair.certificate))
        with httpx2.Client(verify=trusted, timeout=PATIENCE) as http:
            assert "<html" in http.get(f"{url}/").text
            assert http.post(f"{url}/v1/completions", json=BODY).text.endswith("data: [DONE]\n\n")
        with pytest.raises(httpx2.TransportError):
            httpx2.get(url.replace("https", "http"), timeout=PATIENCE)
        server.signal(signal.SIGTERM)
        assert server.ended() == 0


def test_a_client_without_a_certificate_is_refused_where_one_is_required(pair: Pair, tmp_path: Path) -> None:
    theirs = certificate(tmp_path, "client")
    flags = {"ssl_certfile": pair.certificate, "ssl_keyfile": pair.key, "ssl_ca_certs": theirs.certificate}
    server = connect.tls_context(connect.settings(**{name: str(path) for name, path in flags.items()}, ssl_cert_reqs=2))  # type: ignore[arg-type]

    def accept() -> str:
        connection, _ = listener.accept()
        try:
            with server.wrap_socket(connection, server_side=True):
                return "accepted"
        except ssl.SSLError as error:
            return str(error)

    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:
        accepted = pool.submit(accept)
        port = listener.getsockname()[1]
        trusting = ssl.create_default_context(cafile=str(pair.certificate))
        trusting.load_cert_chain(theirs.certificate, theirs.key)
        with (
            socket.create_connection(("127.0.0.1", port)) as end,
            trusting.wrap_socket(end, server_hostname="localhost"),
        ):
            assert accepted.result(PATIENCE) == "accepted"
        refused = pool.submit(accept)
        plain = ssl.create_default_context(cafile=str(pair.certificate))
        with (
            contextlib.suppress(OSError),
            socket.create_connection(("127.0.0.1", port)) as end,
            plain.wrap_socket(end, server_hostname="localhost") as without,
        ):
            without.recv(1)
        assert "peer did not return a certificate" in refused.result(PATIENCE)


def test_files_that_are_no_certificate_end_the_server_with_a_line(pair: Pair, tmp_path: Path) -> None:
    nothing = tmp_path / "none.pem"
    for given, why in (
        ({"ssl_certfile": str(nothing)}, f"cannot use {nothing} for TLS: no such file or directory"),
        ({"ssl_certfile": str(Path(__file__))}, "it is no pem file"),
        (
            {
                "ssl_certfile": str(pair.certificate),
                "ssl_keyfile": str(pair.key),
                "ssl_ca_certs": str(nothing),
                "ssl_cert_reqs": 1,
            },
            f"cannot use .*{nothing} for TLS: ",
        ),
    ):
        with pytest.raises(ValueError, match=why):
            connect.tls_context(connect.settings(**given))
    with life("--ssl-certfile", str(nothing), scripted=True) as server:
        assert server.ended() == 1
    (line,) = server.lines
    assert logfmt(line)["message"] == f"cannot use {nothing} for TLS: no such file or directory"


# A path behind a proxy.


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/llm/v1/models", 401),
        ("/v1/models", 401),
        ("/llm/llm/health", 401),
        ("/llmx/health", 401),
        ("/llm/health", 200),
        ("/health", 200),
        ("/llm", 200),
        ("/llm/", 200),
    ],
)
def test_routes_are_under_the_root_path_whether_or_not_the_proxy_has_taken_it_off(path: str, status: int) -> None:
    """And so are those that need a key."""

    async def main() -> int:
        async with client(FakeEngine(), connect.settings(root_path="/llm", api_keys=("k",))) as http:
            document = (await http.get("/llm/openapi.json", headers={"authorization": "Bearer k"})).json()
            assert document["servers"] == [{"url": "/llm"}]
            return int((await http.get(path)).status_code)

    assert asyncio.run(main()) == status

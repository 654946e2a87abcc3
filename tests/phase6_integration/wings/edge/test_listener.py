"""Where a server listens: a Unix socket, TLS, a path behind a proxy; and the health check of its container."""

import asyncio
import signal
import socket
import ssl
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest

from phase6_integration.api.settings import ServerSettings
from phase6_integration.cli import probe
from phase6_integration.cli.probe import Address
from phase6_integration.wings.edge.listener import file_of, listen, url_of, withdraw
from phase6_integration.wings.edge.tls import tls_context
from tests.phase6_integration.fake_engine import FakeEngine, client
from tests.phase6_integration.life import PATIENCE, Life, life, started

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
        process = Path(f"/proc/{server.process.pid}/cmdline")
        assert probe.main(process) == 1, "the health check of a container: it loads"
        server.signal(signal.SIGUSR1)
        server.until("ready")
        assert probe.main(process) == 0
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), timeout=PATIENCE) as http:
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
    with listen(settings) as second:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(str(path))
        made = file_of(second)
        path.rename(tmp_path / "before")
        with listen(settings) as third:
            withdraw(second, made)
            assert path.exists(), "it is another server's now"
            withdraw(third, file_of(third))
        assert not path.exists()


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


def test_the_health_check_of_a_container_asks_where_the_flags_of_its_server_say() -> None:
    for arguments, address in (
        ((), Address("127.0.0.1", 8000)),
        (("--host", "0.0.0.0", "/model", "--port=8001", "--max-num-seqs", "4"), Address("127.0.0.1", 8001)),
        (("--host", "::", "--ssl-certfile", "c.pem"), Address("::1", 8000, tls=True)),
        (("--uds", "/tmp/s"), Address(uds="/tmp/s")),
    ):
        assert Address.of(arguments) == address


# TLS.


def test_tls_serves_streams_and_reads_its_certificate_again(pair: Pair, tmp_path: Path) -> None:
    mine = Pair(tmp_path / "c.pem", tmp_path / "c.key")
    for source, copy in zip(pair, mine, strict=True):
        copy.write_bytes(source.read_bytes())
    with life("--ssl-certfile", str(mine.certificate), "--ssl-keyfile", str(mine.key), scripted=True) as server:
        url = server.until(r"listening url=(https://127.0.0.1:\d+) ")[1]
        server.signal(signal.SIGUSR1)
        server.until("ready")
        server.signal(signal.SIGUSR1)
        assert probe.Address(port=int(url.rpartition(":")[2]), tls=True).get("/health") == (200, b'{"status":"ready"}')
        trusted = ssl.create_default_context(cafile=str(pair.certificate))
        with httpx.Client(verify=trusted, timeout=PATIENCE) as http:
            assert "<html" in http.get(f"{url}/").text
            assert http.post(f"{url}/v1/completions", json=BODY).text.endswith("data: [DONE]\n\n")
        with pytest.raises(httpx.TransportError):
            httpx.get(url.replace("https", "http"), timeout=PATIENCE)
        other = certificate(tmp_path, "other")
        mine.certificate.write_bytes(other.certificate.read_bytes())
        server.signal(signal.SIGHUP)
        server.until("what is in use stays: .*key values mismatch")
        assert httpx.get(f"{url}/version", verify=trusted, timeout=PATIENCE).status_code == 200
        mine.key.write_bytes(other.key.read_bytes())
        server.signal(signal.SIGHUP)
        server.until("the certificate was read again")
        now = ssl.create_default_context(cafile=str(other.certificate))
        assert httpx.get(f"{url}/version", verify=now, timeout=PATIENCE).status_code == 200
        server.signal(signal.SIGTERM)
        assert server.ended() == 0
        assert not [
            line for line in server.lines if " failed" in line
        ]  # uvicorn heard of a pause before the connection


def test_a_client_without_a_certificate_is_refused_where_one_is_required(pair: Pair, tmp_path: Path) -> None:
    """And a health check that is refused for that sees a server."""
    theirs = certificate(tmp_path, "client")
    flags = {"ssl_certfile": pair.certificate, "ssl_keyfile": pair.key, "ssl_ca_certs": theirs.certificate}
    server = tls_context(ServerSettings(**{name: str(path) for name, path in flags.items()}, ssl_cert_reqs=2))  # type: ignore[arg-type]

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
        words = [f"--{name.replace('_', '-')}={path}" for name, path in flags.items()]
        command = ["nanoserve", "serve", *words, "--ssl-cert-reqs=2", f"--port={port}", ""]
        (tmp_path / "cmdline").write_text("\0".join(command))
        refused = pool.submit(accept)
        assert probe.main(tmp_path / "cmdline") == 0
        assert "peer did not return a certificate" in refused.result(PATIENCE)
    assert probe.main(tmp_path / "cmdline") == 1, "no server is there"


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
            tls_context(ServerSettings(**given))
    with life("--ssl-certfile", str(nothing), scripted=True) as server:
        assert server.ended() == 1
    assert server.lines == [f"nanoserve serve: cannot use {nothing} for TLS: no such file or directory"]


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
        async with client(FakeEngine(), ServerSettings(root_path="/llm", api_keys=("k",))) as http:
            document = (await http.get("/llm/openapi.json", headers={"authorization": "Bearer k"})).json()
            assert document["servers"] == [{"url": "/llm"}]
            return int((await http.get(path)).status_code)

    assert asyncio.run(main()) == status

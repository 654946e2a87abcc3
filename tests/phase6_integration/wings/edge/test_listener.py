"""Where a server listens: a Unix socket, TLS, a path behind a proxy; and what the log says of it."""

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
from phase6_integration.wings.edge.listener import Listener
from phase6_integration.wings.edge.tls import Tls
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
    one = Life(started("--uds", str(path), port=None, scripted=True))
    try:
        yield one
    finally:
        one.process.kill()
        one.close()


def test_a_unix_socket_serves_and_is_gone_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with on_a_socket(path) as one:
        assert one.until(r"listening url=(\S+)")[1] == f"unix:{path}"
        process = Path(f"/proc/{one.process.pid}/cmdline")
        assert probe.main(process) == 1, "the health check of a container: it loads"
        one.signal(signal.SIGUSR1)
        one.until("ready")
        assert probe.main(process) == 0
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), timeout=PATIENCE) as http:
            assert http.get("http://any.name/v1/models").status_code == 200
            one.signal(signal.SIGUSR1)
            assert http.post("http://localhost/v1/completions", json=BODY).text.endswith("data: [DONE]\n\n")
        one.signal(signal.SIGTERM)
        assert one.ended() == 0
    assert not path.exists()
    assert not [line for line in one.lines if "playground" in line], "a browser cannot open it"


def test_a_socket_in_use_is_refused_and_one_left_behind_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "s"
    settings = ServerSettings(uds=str(path))
    first = Listener(settings)
    with pytest.raises(OSError, match=r"^Address already in use$"):
        Listener(settings)
    first.socket.close()  # as a server that was killed leaves it
    second = Listener(settings)
    first.close()
    assert path.exists(), "it is the second one's now"
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(path))
    second.close()
    assert not path.exists()


def test_a_file_that_is_no_socket_is_kept(tmp_path: Path) -> None:
    file = tmp_path / "s"
    file.write_text("mine")
    with pytest.raises(OSError, match=r"^Address already in use$"):
        Listener(ServerSettings(uds=str(file)))
    assert file.read_text() == "mine"


@pytest.mark.parametrize(("host", "page"), [("127.0.0.1", "127.0.0.1"), ("0.0.0.0", "127.0.0.1")])
def test_the_playground_is_at_an_address_that_a_browser_can_open(host: str, page: str) -> None:
    listener = Listener(ServerSettings(host=host, port=0))
    port = listener.socket.getsockname()[1]
    assert (listener.url, listener.page) == (f"http://{host}:{port}", f"http://{page}:{port}/")
    listener.close()


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
    with life("--ssl-certfile", str(mine.certificate), "--ssl-keyfile", str(mine.key), scripted=True) as one:
        assert one.until(r"listening url=(\w+):")[1] == "https"
        one.signal(signal.SIGUSR1)
        one.until("ready")
        url = one.until(r"playground url=(https://127.0.0.1:\d+)/$")[1]
        one.signal(signal.SIGUSR1)
        assert probe.Address(port=int(url.rpartition(":")[2]), tls=True).get("/health") == (200, b'{"status":"ready"}')
        trusted = ssl.create_default_context(cafile=str(pair.certificate))
        with httpx.Client(verify=trusted, timeout=PATIENCE) as http:
            assert "<html" in http.get(f"{url}/").text
            assert http.post(f"{url}/v1/completions", json=BODY).text.endswith("data: [DONE]\n\n")
        with pytest.raises(httpx.TransportError):
            httpx.get(url.replace("https", "http"), timeout=PATIENCE)
        other = certificate(tmp_path, "other")
        mine.certificate.write_bytes(other.certificate.read_bytes())
        one.signal(signal.SIGHUP)
        one.until("the certificate is kept: .*key values mismatch")
        assert httpx.get(f"{url}/version", verify=trusted, timeout=PATIENCE).status_code == 200
        mine.key.write_bytes(other.key.read_bytes())
        one.signal(signal.SIGHUP)
        one.until("the certificate was read again")
        now = ssl.create_default_context(cafile=str(other.certificate))
        assert httpx.get(f"{url}/version", verify=now, timeout=PATIENCE).status_code == 200
        one.signal(signal.SIGTERM)
        assert one.ended() == 0
        assert not [said for said in one.lines if " failed" in said]  # uvicorn heard of a pause before the connection


def test_a_client_without_a_certificate_is_refused_where_one_is_required(pair: Pair, tmp_path: Path) -> None:
    theirs = certificate(tmp_path, "client")
    tls = Tls(
        ServerSettings(
            ssl_certfile=str(pair.certificate),
            ssl_keyfile=str(pair.key),
            ssl_ca_certs=str(theirs.certificate),
            ssl_cert_reqs=2,
        )
    )

    def handshake(context: ssl.SSLContext) -> None:
        """Both sides in memory, until the client has heard what the server thinks of it."""
        to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
        ours = tls.context.wrap_bio(to_server, to_client, server_side=True)
        other = context.wrap_bio(to_client, to_server, server_hostname="localhost")
        waiting = [other, ours]
        while waiting:
            side = waiting.pop(0)
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                waiting.append(side)

    context = ssl.create_default_context(cafile=str(pair.certificate))
    with pytest.raises(ssl.SSLError, match="peer did not return a certificate"):
        handshake(context)
    context.load_cert_chain(theirs.certificate, theirs.key)
    handshake(context)


def test_a_server_that_refuses_the_health_check_for_its_certificate_is_healthy(pair: Pair, tmp_path: Path) -> None:
    flags = {"ssl_certfile": pair.certificate, "ssl_keyfile": pair.key, "ssl_ca_certs": pair.certificate}
    context = Tls(ServerSettings(**{name: str(path) for name, path in flags.items()}, ssl_cert_reqs=2)).context  # type: ignore[arg-type]

    def refuse() -> None:
        connection, _ = listener.accept()
        with connection, pytest.raises(ssl.SSLError, match="peer did not return a certificate"):
            context.wrap_socket(connection, server_side=True)

    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:
        words = [f"--{name.replace('_', '-')}={path}" for name, path in flags.items()]
        port = f"--port={listener.getsockname()[1]}"
        (tmp_path / "cmdline").write_text("\0".join(["nanoserve", "serve", *words, "--ssl-cert-reqs=2", port, ""]))
        refused = pool.submit(refuse)
        assert probe.main(tmp_path / "cmdline") == 0
        refused.result(PATIENCE)
    assert probe.main(tmp_path / "cmdline") == 1, "no server is there"


def test_files_that_are_no_certificate_end_the_server_with_a_line(pair: Pair, tmp_path: Path) -> None:
    nothing = tmp_path / "none.pem"
    for given, why in (
        ({"ssl_certfile": str(nothing)}, f"cannot use {nothing}: No such file or directory"),
        ({"ssl_certfile": str(Path(__file__))}, "it is no pem file"),
        (
            {"ssl_certfile": str(pair.certificate), "ssl_ca_certs": str(nothing), "ssl_cert_reqs": 1},
            "cannot use .*: (No such file or directory|it is no pem file)",
        ),
    ):
        with pytest.raises(ValueError, match=why):
            Tls(ServerSettings(**given))
    with life("--ssl-certfile", str(nothing), scripted=True) as one:
        assert one.ended() == 1
    assert one.lines == [f"nanoserve serve: ssl_certfile, ssl_keyfile: cannot use {nothing}: No such file or directory"]


# A path behind a proxy.


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/llm/v1/models", 200),
        ("/v1/models", 200),
        ("/llm", 200),
        ("/llm/", 200),
        ("/llmx/v1/models", 404),
        ("/llm/llm/v1/models", 404),
    ],
)
def test_routes_are_under_the_root_path_whether_or_not_the_proxy_has_taken_it_off(path: str, status: int) -> None:
    async def main() -> httpx.Response:
        async with client(FakeEngine(), ServerSettings(root_path="/llm")) as http:
            document = (await http.get("/llm/openapi.json")).json()
            assert document["servers"] == [{"url": "/llm"}]
            return await http.get(path)

    assert asyncio.run(main()).status_code == status


def test_a_key_is_needed_under_the_root_path_too() -> None:
    async def main() -> list[int]:
        async with client(FakeEngine(), ServerSettings(root_path="/llm", api_keys=("k",))) as http:
            paths = ("/llm/v1/models", "/v1/models", "/llm/llm/health", "/llm/health", "/llm/version")
            return [(await http.get(path)).status_code for path in paths]

    assert asyncio.run(main()) == [401, 401, 401, 200, 200]

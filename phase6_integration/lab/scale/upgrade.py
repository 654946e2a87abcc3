"""An upgrade under load: streaming clients behind nginx or HAProxy while a new server takes the place of the old one.

The proxies run with their files of `phase6_integration/deploy`. Every request has a connection of its own, as those of
different people have. The old server gets SIGTERM while it streams: it refuses new requests, and completes what it has.
"""

import asyncio
import itertools
import os
import random
import re
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import httpx2
from rich.console import Console

from phase0_request.lab.metrics import percentile
from phase0_request.lab.report import at_least_one, finish, parser, section
from phase2_prefill_decode.model import default_device
from phase6_integration.load.client import COMPLETIONS, LoadTest, send
from phase6_integration.load.connection import Pool
from phase6_integration.load.response import Outcome

DEPLOY = Path(__file__).parents[2] / "deploy"
PROXIES = {"nginx": "nginx.conf", "haproxy": "haproxy.cfg"}
PORTS = ("127.0.0.1:8000", "127.0.0.1:8001")  # of the servers, in these files
ANSWERS = range(64, 256)  # their tokens: some end while others go on
PATIENCE = 120.0  # seconds, for whatever is waited for
MAIN = """
daemon off; worker_processes 1; {user}
pid {directory}/pid; error_log stderr;
events {{}}
http {{ access_log off; client_body_temp_path {directory}/body; include {directory}/nginx.conf; }}
"""


# Proxies and servers.


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as one:
        port: int = one.getsockname()[1]
    return port


def certify(directory: Path) -> None:
    """Make a certificate for the proxies: llm.key, and llm.pem, which holds the key too."""
    key, pem = directory / "llm.key", directory / "llm.pem"
    subject = ("-subj", "/CN=llm.example.com", "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", key, "-out", pem)
    command = ("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", *subject)
    subprocess.run(command, check=True, capture_output=True)
    pem.write_text(pem.read_text() + key.read_text())


@dataclass
class Proxy:
    """nginx or HAProxy with its file of `deploy`, in which only ports, paths and, if `timeout` is given, long times are
    other ones."""

    name: str
    directory: Path  # for its files
    certificate: Path  # the directory of `certify`
    timeout: str | None = None
    port: int = field(default_factory=free_port)

    @property
    def url(self) -> str:
        return f"https://127.0.0.1:{self.port}"

    @property
    def tls(self) -> ssl.SSLContext:
        """Trusts its certificate."""
        return ssl.create_default_context(cafile=self.certificate / "llm.pem")

    def configure(self, *ports: int) -> None:
        """Write its file, for servers on these ports."""
        text = (DEPLOY / PROXIES[self.name]).read_text().replace("/etc/ssl", str(self.certificate))
        text = text.replace("/run/haproxy", str(self.directory))
        for default, port in zip(PORTS, ports, strict=False):
            text = text.replace(default, f"127.0.0.1:{port}")
        text, found = re.subn(r"(listen |bind :)443", rf"\g<1>{self.port}", text)
        assert found == 1
        if self.timeout is not None:
            text, found = re.subn(r"\b(1860|60|30)s", self.timeout, text)
            assert found
        (self.directory / PROXIES[self.name]).write_text(text)

    def replace(self, process: "subprocess.Popen[bytes]", old: int, new: int) -> None:
        """Send new requests to the new server only, as the proxy's file says."""
        if self.name == "nginx":
            self.configure(new, old)
            process.send_signal(signal.SIGHUP)
        else:
            with socket.socket(socket.AF_UNIX) as admin:
                admin.connect(str(self.directory / "admin.sock"))
                admin.sendall(b"set server engine/one state drain\n")
                admin.recv(1)

    @contextmanager
    def run(self) -> Iterator["subprocess.Popen[bytes]"]:
        """The proxy as a process. On SIGHUP nginx reads its file again."""
        command: list[str | Path] = ["haproxy", "-db", "-f", self.directory / PROXIES["haproxy"]]
        if self.name == "nginx":
            main = self.directory / "main.conf"
            main.write_text(MAIN.format(directory=self.directory, user="" if os.geteuid() else "user root;"))
            command = ["nginx", "-p", self.directory, "-c", main]
        with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL) as process:
            try:
                while not self._listens():
                    if process.poll() is not None:
                        raise RuntimeError(process.stderr.read().decode() if process.stderr else "")
                    time.sleep(0.01)
                yield process
            finally:
                process.terminate()

    def _listens(self) -> bool:
        with socket.socket() as one:
            return one.connect_ex(("127.0.0.1", self.port)) == 0


@contextmanager
def server(version: str, port: int, directory: Path) -> Iterator["subprocess.Popen[bytes]"]:
    """`nanoserve serve` of the bundled model, which clients know as `model`, and operators by its version."""
    flags = ["--port", str(port), "--served-model-name", "model", version, "--threads", "1", "--shutdown-timeout", "60"]
    with (
        (directory / f"{version}.log").open("wb") as log,
        subprocess.Popen([sys.executable, "-m", "phase6_integration.cli", "serve", *flags], stderr=log) as process,
    ):
        try:
            yield process
        finally:
            process.terminate()


# Clients.


class Clients:
    """Each sends the next request when it has the answer to the last, until they are stopped."""

    def __init__(self, proxy: Proxy, count: int) -> None:
        self.load = LoadTest(url=proxy.url, timeout=PATIENCE)
        self.tls = proxy.tls
        self.outcomes: list[Outcome] = []
        self.going = True
        self._numbers = itertools.count()
        self.tasks = [asyncio.create_task(self._one()) for _ in range(count)]

    async def _one(self) -> None:
        while self.going:
            choose = random.Random(next(self._numbers))
            prompt, length = [choose.randrange(300, 4000) for _ in range(48)], choose.choice(ANSWERS)
            body = self.load.body("model", False, [{"content": prompt}], length)
            pool = Pool(self.load.url, None, time.perf_counter, self.tls)  # of one connection
            request = pool.request("POST", COMPLETIONS, body)
            outcome = await send(pool, request, self.load, time.perf_counter, time.perf_counter())
            await pool.close()
            if outcome.error is None and outcome.output_tokens != length:
                outcome = replace(outcome, error=f"{outcome.output_tokens} tokens in place of {length}")
            self.outcomes.append(outcome)

    async def answered(self, more: int) -> None:
        """Wait for this many more answers."""
        end = len(self.outcomes) + more
        async with asyncio.timeout(PATIENCE):
            while len(self.outcomes) < end:
                await asyncio.sleep(0.02)

    async def stop(self) -> None:
        self.going = False
        await asyncio.gather(*self.tasks)


async def ready(url: str, version: str, tls: ssl.SSLContext) -> None:
    """Wait until the server that answers there is of this version, and ready."""
    none = httpx2.Limits(max_keepalive_connections=0)
    async with asyncio.timeout(PATIENCE), httpx2.AsyncClient(base_url=url, verify=tls, limits=none) as http:
        while True:
            with suppress(httpx2.HTTPError, ValueError, LookupError):
                models = (await http.get("/v1/models")).json()["data"]
                if version in {model["id"] for model in models} and (await http.get("/health/ready")).is_success:
                    return
            await asyncio.sleep(0.02)


# The upgrade.


@dataclass
class Figures:
    requests: int
    lost: int  # refused, or never answered
    truncated: int  # begun, and not whole
    old_requests: int  # that the old server answered
    new_requests: int
    refused: int  # by the old server, which drains
    drain_seconds: float  # from SIGTERM to the end of the old server
    events_per_token: float  # 1: each token came by itself
    ttft_p99_before_ms: float  # before the new server was started
    ttft_p99_ms: float  # from its start to the end of the old one
    gap_before_ms: float  # the longest between two events of one answer
    gap_ms: float
    wrong: list[str]


async def upgrade(name: str, clients: int, directory: Path) -> Figures:
    """Run the clients, replace the old server by a new one, and see what they got."""
    certify(directory)
    proxy, ports = Proxy(name, directory, directory), (free_port(), free_port())
    proxy.configure(*ports)
    to_old, to_new = (f"http://127.0.0.1:{port}" for port in ports)
    with server("old", ports[0], directory) as old:
        await ready(to_old, "old", proxy.tls)
        with proxy.run() as process:
            await ready(proxy.url, "old", proxy.tls)
            users = Clients(proxy, clients)
            await users.answered(2 * clients)
            begin = time.perf_counter()
            with server("new", ports[1], directory):
                await ready(to_new, "new", proxy.tls)
                if name == "haproxy":
                    await ready(proxy.url, "new", proxy.tls)  # it has checked it
                proxy.replace(process, *ports)
                await ready(proxy.url, "new", proxy.tls)
                await asyncio.sleep(1)  # requests that were on their way have arrived
                start = time.perf_counter()
                old.send_signal(signal.SIGTERM)
                await asyncio.to_thread(old.wait, PATIENCE)
                end = time.perf_counter()
                await users.answered(2 * clients)
                await users.stop()
    if old.returncode != 0:
        raise RuntimeError(f"the old server ended with {old.returncode}")
    return figures(users.outcomes, begin, start, end, directory)


def logged(directory: Path, version: str, status: int) -> int:
    """How many completions a server has answered with this status, by its log."""
    return (directory / f"{version}.log").read_text().count(f" path=/v1/completions status={status} ")


def figures(outcomes: Sequence[Outcome], begin: float, start: float, end: float, directory: Path) -> Figures:
    """Of an upgrade from `begin` to `end`, in which the drain began at `start`."""

    def longest(some: Sequence[Outcome]) -> float:
        return 1e3 * max(gap for outcome in some for gap in outcome.itl)

    def p99(some: Sequence[Outcome]) -> float:
        return 1e3 * percentile([outcome.ttft for outcome in some], 99)

    begun = [outcome for outcome in outcomes if outcome.deliveries]
    before = [outcome for outcome in begun if outcome.last < begin]
    during = [outcome for outcome in begun if outcome.sent < end and outcome.last >= begin]
    return Figures(
        requests=len(outcomes),
        lost=sum(outcome.error is not None and not outcome.deliveries for outcome in outcomes),
        truncated=sum(outcome.error is not None for outcome in begun),
        old_requests=logged(directory, "old", 200),
        new_requests=logged(directory, "new", 200),
        refused=logged(directory, "old", 503),
        drain_seconds=end - start,
        events_per_token=sum(len(one.deliveries) for one in outcomes) / sum(one.output_tokens for one in outcomes),
        ttft_p99_before_ms=p99(before),
        ttft_p99_ms=p99(during),
        gap_before_ms=longest(before),
        gap_ms=longest(during),
        wrong=[outcome.error for outcome in outcomes if outcome.error is not None],
    )


def main(arguments: list[str] | None = None) -> int:
    p = parser("phase6_integration.lab scale.upgrade", __doc__)
    p.add_argument("--proxies", nargs="+", choices=[*PROXIES], default=[*PROXIES])
    p.add_argument("--clients", type=at_least_one, default=40, help="that stream at any time (%(default)s)")
    options = p.parse_args(arguments)
    rows = {}
    for name in options.proxies:
        with tempfile.TemporaryDirectory() as directory:
            rows[name] = asdict(asyncio.run(upgrade(name, options.clients, Path(directory))))
        print(name, "has replaced the old server", *rows[name].pop("wrong"), sep="\n", flush=True)
    section(Console(), f"{options.clients} clients", rows)
    found = {"clients": options.clients, "answer_mean": sum(ANSWERS) / len(ANSWERS), **rows}
    finish(p, options, arguments, found, gpu=default_device().type == "cuda")
    return 0

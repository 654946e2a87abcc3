"""An upgrade under load: streaming clients behind nginx or HAProxy while a new server takes the place of the old one.

The proxies run with their files of `phase6_integration/deploy`. Every request has a connection of its own, as those of
different people have. The old server gets SIGTERM while it streams: it refuses new requests, and completes what it has.
"""

import asyncio
import itertools
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console

from phase0_request.lab.metrics import percentile
from phase0_request.lab.report import at_least_one, finish, parser, section

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
    subject = ("-subj", "/CN=llm.example.com", "-keyout", key, "-out", pem)
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


@dataclass
class Outcome:
    """One request: when it was sent, when pieces of its answer came, and what was wrong with it."""

    sent: float
    length: int  # in tokens
    arrivals: list[float] = field(default_factory=list)
    lost: str = ""  # it was refused, or never answered
    truncated: str = ""  # its answer began, and is not whole


async def ask(http: httpx.AsyncClient, prompt: Sequence[int], length: int) -> Outcome:
    """One streamed answer of so many tokens."""
    body: dict[str, Any] = {"model": "model", "prompt": prompt, "max_tokens": length, "ignore_eos": True}
    body |= {"temperature": 0, "stream": True, "stream_options": {"include_usage": True}}
    outcome, reason, tokens, last = Outcome(time.perf_counter(), length), None, 0, ""
    try:
        async with http.stream("POST", "/v1/completions", json=body) as response:
            if response.status_code != 200:
                outcome.lost = f"{response.status_code}: {(await response.aread())[:200]!r}"
                return outcome
            async for line in response.aiter_lines():
                last = line or last
                if not line.startswith("data: {"):
                    continue
                event = json.loads(line[6:])
                tokens = (event.get("usage") or {}).get("completion_tokens", tokens)
                for choice in event.get("choices", ()):
                    outcome.arrivals.append(time.perf_counter())
                    reason = choice["finish_reason"] or reason
    except httpx.HTTPError as error:
        last = repr(error)
        if not outcome.arrivals:
            outcome.lost = last
            return outcome
    if (reason, tokens, last) != ("length", length, "data: [DONE]"):
        outcome.truncated = f"{reason}, {tokens} tokens, {last[:200]}"
    return outcome


class Clients:
    """Each sends the next request when it has the answer to the last, until they are stopped."""

    def __init__(self, http: httpx.AsyncClient, count: int) -> None:
        self.http = http
        self.outcomes: list[Outcome] = []
        self.going = True
        self._numbers = itertools.count()
        self.tasks = [asyncio.create_task(self._one()) for _ in range(count)]

    async def _one(self) -> None:
        while self.going:
            choose = random.Random(next(self._numbers))
            prompt, length = [choose.randrange(300, 4000) for _ in range(48)], choose.choice(ANSWERS)
            self.outcomes.append(await ask(self.http, prompt, length))

    async def answered(self, more: int) -> None:
        """Wait for so many more answers."""
        end = len(self.outcomes) + more
        await until(lambda: done(len(self.outcomes) >= end))

    async def stop(self) -> None:
        self.going = False
        await asyncio.gather(*self.tasks)


async def done(whether: bool) -> bool:
    return whether


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(PATIENCE):
        while not await condition():
            await asyncio.sleep(0.02)


async def knows(http: httpx.AsyncClient, version: str) -> bool:
    """Whether the server that answers is of this version, and ready."""
    try:
        models = (await http.get("/v1/models")).json()["data"]
        return version in {model["id"] for model in models} and (await http.get("/health/ready")).is_success
    except (httpx.HTTPError, ValueError, LookupError):
        return False


# The upgrade.


@dataclass
class Figures:
    requests: int
    lost: int
    truncated: int
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
    one, ports = Proxy(name, directory, directory), (free_port(), free_port())
    one.configure(*ports)
    limits = httpx.Limits(max_keepalive_connections=0)
    with server("old", ports[0], directory) as old:
        async with (
            httpx.AsyncClient(base_url=f"http://127.0.0.1:{ports[0]}", limits=limits) as to_old,
            httpx.AsyncClient(base_url=f"http://127.0.0.1:{ports[1]}", limits=limits) as to_new,
            httpx.AsyncClient(base_url=one.url, limits=limits, verify=False, timeout=PATIENCE) as http,
        ):
            await until(lambda: knows(to_old, "old"))
            with one.run() as process:
                await until(lambda: knows(http, "old"))
                users = Clients(http, clients)
                await users.answered(2 * clients)
                begin = time.perf_counter()
                with server("new", ports[1], directory):
                    await until(lambda: knows(to_new, "new"))
                    if name == "haproxy":
                        await until(lambda: knows(http, "new"))  # it has checked it
                    one.replace(process, *ports)
                    await until(lambda: knows(http, "new"))
                    await asyncio.sleep(1)  # requests that were on their way have arrived
                    start = time.perf_counter()
                    old.send_signal(signal.SIGTERM)
                    await until(lambda: done(old.poll() is not None))
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

    def gaps(some: Sequence[Outcome]) -> float:
        pairs = (pair for outcome in some for pair in itertools.pairwise(outcome.arrivals))
        return 1e3 * max(later - earlier for earlier, later in pairs)

    def p99(some: Sequence[Outcome]) -> float:
        return 1e3 * percentile([outcome.arrivals[0] - outcome.sent for outcome in some if outcome.arrivals], 99)

    before = [outcome for outcome in outcomes if outcome.arrivals and outcome.arrivals[-1] < begin]
    during = [
        outcome for outcome in outcomes if outcome.sent < end and outcome.arrivals and outcome.arrivals[-1] >= begin
    ]
    wrong = [outcome.lost or outcome.truncated for outcome in outcomes if outcome.lost or outcome.truncated]
    return Figures(
        requests=len(outcomes),
        lost=sum(bool(outcome.lost) for outcome in outcomes),
        truncated=sum(bool(outcome.truncated) for outcome in outcomes),
        old_requests=logged(directory, "old", 200),
        new_requests=logged(directory, "new", 200),
        refused=logged(directory, "old", 503),
        drain_seconds=end - start,
        events_per_token=sum(len(one.arrivals) for one in outcomes) / sum(one.length for one in outcomes),
        ttft_p99_before_ms=p99(before),
        ttft_p99_ms=p99(during),
        gap_before_ms=gaps(before),
        gap_ms=gaps(during),
        wrong=wrong,
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
    finish(p, options, arguments, {"clients": options.clients, "answer_mean": sum(ANSWERS) / len(ANSWERS), **rows})
    return 0

"""Compare the engine on a thread and in its own process, behind the same server, under the same load.

Measured are the throughput that clients see, the delay of the server's event loop, and the time of a garbage collection
over the objects made since the start and over all objects.
"""

import asyncio
import gc
import json
import socket
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import uvicorn
import uvloop
from rich.console import Console

from phase0_request.lab.metrics import percentile
from phase0_request.lab.report import finish, parser, section
from phase0_request.support import entry
from phase2_prefill_decode.model import default_device
from phase6_integration.api.settings import ServerSettings
from phase6_integration.connect import create_app, server_config
from phase6_integration.engine.gc_freeze import freeze
from phase6_integration.engine.options import EngineOptions
from phase6_integration.process.async_engine import AsyncEngine
from phase6_integration.process.engine_client import EngineClient
from phase6_integration.process.engine_process import serve
from phase6_integration.process.messages import Channel

TICK = 0.002  # seconds


class ThreadClient(EngineClient):
    """Runs the engine on a thread of this process."""

    def spawn(self, end: socket.socket) -> None:
        self.thread = threading.Thread(target=serve, args=(Channel(end),))
        self.thread.start()

    async def stop(self) -> None:
        await super().stop()
        await asyncio.to_thread(self.thread.join)


class OnAThread(AsyncEngine):
    """The engine on a thread of the server's process."""

    client_type = ThreadClient


HOSTS = {"process": AsyncEngine, "thread": OnAThread}


@dataclass(frozen=True, slots=True)
class Outcome:
    """The figures of one host. `late` is the delay of the event loop, `walk` the time of a garbage collection."""

    tokens_per_second: float
    ttft_p99_ms: float
    late_p50_ms: float
    late_p99_ms: float
    late_most_ms: float
    walk_new_ms: float
    walk_all_ms: float


async def measure(host: str, clients: int, requests: int) -> Outcome:
    """Serve on a free port; the clients are another process."""
    listener = socket.create_server(("127.0.0.1", 0))
    async with HOSTS[host](EngineOptions(max_num_seqs=clients, threads=1)) as engine:
        settings = ServerSettings()
        app = create_app(engine, settings)
        config = server_config(app, settings)
        config.load()
        freeze()
        server = uvicorn.Server(config)
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        late: list[float] = []
        watching = asyncio.create_task(watch(late))
        report = await asyncio.to_thread(load, listener.getsockname()[1], clients, requests)
        watching.cancel()
        new = walk()
        gc.unfreeze()
        everything = walk()
        server.should_exit = True
        await serving
    return Outcome(
        report["output_throughput"],
        report["p99_ttft_ms"],
        1e3 * percentile(late, 50),
        1e3 * percentile(late, 99),
        1e3 * max(late),
        1e3 * new,
        1e3 * everything,
    )


async def watch(late: list[float]) -> None:
    """Record again and again how late the event loop wakes this task."""
    while True:
        before = time.perf_counter()
        await asyncio.sleep(TICK)
        late.append(time.perf_counter() - before - TICK)


def walk() -> float:
    """Seconds of a full garbage collection."""
    start = time.perf_counter()
    gc.collect()
    return time.perf_counter() - start


def load(port: int, clients: int, requests: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "report.json"
        flags = ["--url", f"http://127.0.0.1:{port}", "--concurrency", f"{clients}", "--num-prompts", f"{requests}"]
        command = [sys.executable, "-m", "phase6_integration.cli", "bench", *flags, "--json", str(file)]
        subprocess.run(command, check=True, capture_output=True, env=entry.environment())
        found: dict[str, float] = json.loads(file.read_text())
        return found


def main(arguments: list[str] | None = None) -> int:
    p = parser("phase6_integration.lab hosts", __doc__)
    p.add_argument("--clients", type=int, default=64, help="at once (64)")
    p.add_argument("--requests", type=int, default=384, help="of all clients together (384)")
    options, console = p.parse_args(arguments), Console(highlight=False)
    outcomes = {host: uvloop.run(measure(host, options.clients, options.requests)) for host in HOSTS}
    title = "The engine in a process, and on a thread; late is the event loop, a walk is the garbage collector's"
    finish(p, options, arguments, section(console, title, outcomes, digits=2), gpu=default_device().type == "cuda")
    return 0

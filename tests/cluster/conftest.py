"""`nanoserve deploy` of the bundled model, started as a user starts it, with a file that a test may change."""

import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
import yaml

PATIENCE = 240.0  # seconds: many processes on few cores
REPLICA = "ray::ServeReplica:nanoserve:Replica"


@dataclass
class Deployed:
    file: Path
    url: str
    process: "subprocess.Popen[str]"
    log: list[str] = field(default_factory=list)

    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", timeout=PATIENCE, max_retries=0)

    def stats(self) -> dict[str, Any]:
        stats: dict[str, Any] = httpx2.get(f"{self.url}/stats", timeout=PATIENCE).json()
        return stats

    def change(self, **args: Any) -> None:
        """Write other arguments into the file, and have it read again."""
        config = yaml.safe_load(self.file.read_text())
        config["applications"][0]["args"] |= args
        self.file.write_text(yaml.safe_dump(config))
        self.process.send_signal(signal.SIGHUP)

    def replicas(self) -> set[int]:
        """The process ids of its replicas."""
        return {
            int(path.parent.name) for path in Path("/proc").glob("[0-9]*/cmdline") if title(path).startswith(REPLICA)
        }

    def engine_seconds(self) -> list[float]:
        """The processor time of each engine process."""
        replicas, seconds = self.replicas(), []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            if "engine_process" in title(path):
                fields = (path.parent / "stat").read_text().rpartition(")")[2].split()
                if int(fields[1]) in replicas:
                    seconds.append((int(fields[11]) + int(fields[12])) / 100)
        return seconds


def title(path: Path) -> str:
    try:
        return path.read_bytes().replace(b"\0", b" ").decode().strip()
    except OSError:  # it has ended
        return ""


def until(happens: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not happens():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def configuration(replicas: int, port: int, **args: Any) -> dict[str, Any]:
    """A file as README.md shows it."""
    deployment = {"name": "Replica", "num_replicas": replicas, "ray_actor_options": {"num_cpus": 0.1}}
    application = {
        "name": "nanoserve",
        "import_path": "phase6_integration.cluster.deployments:application",
        "args": {"kv_cache_pages": 256, "threads": 1, **args},
        "deployments": [deployment],
    }
    options = {"host": "127.0.0.1", "port": port}
    return {"proxy_location": "HeadOnly", "http_options": options, "applications": [application]}


def deployed(directory: Path, replicas: int, **args: Any) -> Iterator[Deployed]:
    """It must end in order on Ctrl-C, and leave no process."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    file = directory / "cluster.yaml"
    file.write_text(yaml.safe_dump(configuration(replicas, port, **args)))
    command = [sys.executable, "-m", "phase6_integration.cli", "deploy", str(file)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) as process:
        cluster = Deployed(file, f"http://127.0.0.1:{port}", process)
        assert process.stderr is not None
        reader = threading.Thread(target=cluster.log.extend, args=(process.stderr,), daemon=True)
        reader.start()
        try:
            until(lambda: any("is running" in line for line in cluster.log) or process.poll() is not None)
            assert process.poll() is None
            until(lambda: httpx2.get(f"{cluster.url}/health").is_success)
            until(lambda: len(cluster.replicas()) == replicas)
            yield cluster
        finally:
            process.send_signal(signal.SIGINT)
            code = process.wait(PATIENCE)
            print("".join(cluster.log))
        assert code == 130
        assert not cluster.replicas()


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployed]:
    yield from deployed(tmp_path_factory.mktemp("two"), 2)


@pytest.fixture
def four(tmp_path: Path) -> Iterator[Deployed]:
    yield from deployed(tmp_path, 4)

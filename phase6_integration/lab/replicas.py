"""Replicas of the bundled model under load, by three routers: `nanoserve deploy`, closed loops of clients, two traces.

Needs the extra `cluster`. Each deployment is a new one, with empty caches, and serves both traces one after the other.
"""

import asyncio
import json
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx2
import yaml
from rich.console import Console

from phase0_request.lab.metrics import percentile
from phase0_request.lab.report import finish, parser, table
from phase2_prefill_decode.model import default_device

ROUTERS: dict[str, dict[str, Any]] = {
    "prefix": {},
    "power_of_two": {
        "request_router_class": "ray.serve._private.request_router.pow_2_router:PowerOfTwoChoicesRequestRouter"
    },
    "affinity": {
        "request_router_class": "phase6_integration.lab.scale.text_router:TokensAsText",
        "request_router_kwargs": {"imbalanced_threshold": 4, "match_rate_threshold": 0.1},
    },
}
START = 240.0  # seconds that a deployment may take
CLIENTS = 12
ANSWER = 16  # tokens
Turns = list[list[int]]  # of one client: the tokens that it adds, turn by turn


class StartError(RuntimeError):
    """The deployment has ended before it ran."""


def conversations(count: int, rng: random.Random) -> list[Turns]:
    """Each begins with tokens of its own, and each turn adds some behind the answer."""
    return [[tokens(rng, 160), *(tokens(rng, 48) for _ in range(5))] for _ in range(count)]


def shared_prefixes(count: int, rng: random.Random) -> list[Turns]:
    """Each is one prompt behind one of 24 prefixes, of which some are popular."""
    prefixes = [tokens(rng, 384) for _ in range(24)]
    weights = [1 / (rank + 1) ** 0.5 for rank in range(24)]
    return [[rng.choices(prefixes, weights)[0] + tokens(rng, 32)] for _ in range(count)]


def tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(300, 4000) for _ in range(count)]


TRACES = {"conversations": (conversations, 36), "shared_prefixes": (shared_prefixes, 216)}


def main(arguments: list[str] | None = None) -> int:
    p = parser("phase6_integration.lab replicas", __doc__)
    p.add_argument("--replicas", type=int, nargs="+", default=[2, 4])
    p.add_argument("--routers", nargs="+", choices=[*ROUTERS], default=[*ROUTERS])
    p.add_argument("--pages", type=int, default=256, help="of each replica (%(default)s)")
    options = p.parse_args(arguments)
    figures: dict[str, Any] = {}
    for replicas in options.replicas:
        for router in options.routers:
            with tempfile.TemporaryDirectory() as directory:
                try:
                    measured = deployed(Path(directory), replicas, router, options.pages)
                except StartError:  # Ray gives its own start 30 seconds, which a busy machine may need
                    measured = deployed(Path(directory), replicas, router, options.pages)
            for trace, row in measured.items():
                print(f"{replicas} replicas, {router}, {trace}: {row}", flush=True)
                figures.setdefault(trace, {}).setdefault(f"replicas_{replicas}", {})[router] = row
            finish(p, options, arguments, figures, gpu=default_device().type == "cuda")
    for trace, sizes in figures.items():
        rows = [(size, router, *row.values()) for size, routers in sizes.items() for router, row in routers.items()]
        Console().print(table(["", "router", *next(iter(next(iter(sizes.values())).values()))], rows, 3, trace))
    return 0


def deployed(directory: Path, replicas: int, router: str, pages: int) -> dict[str, dict[str, float]]:
    """Deploy, run both traces, and stop."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    replica: dict[str, Any] = {"name": "Replica", "num_replicas": replicas, "ray_actor_options": {"num_cpus": 0.1}}
    if ROUTERS[router]:
        replica["request_router_config"] = ROUTERS[router]
    application = {
        "name": "nanoserve",
        "import_path": "phase6_integration.cluster.deployments:application",
        "args": {"kv_cache_pages": pages, "threads": 1},
        "deployments": [replica],
    }
    file = directory / "cluster.yaml"
    config = {"proxy_location": "HeadOnly", "http_options": {"port": port}, "applications": [application]}
    file.write_text(yaml.safe_dump(config))
    command = [sys.executable, "-m", "phase6_integration.cli", "deploy", str(file)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        until_running(process.stderr)
        url, rows = f"http://127.0.0.1:{port}", {}
        for name, (make, count) in TRACES.items():
            rows[name] = asyncio.run(run(url, make(count, random.Random(1))))
        return rows
    finally:
        process.send_signal(signal.SIGINT)
        process.wait()


def until_running(lines: Iterator[str]) -> None:
    said = []
    for line in lines:
        said.append(line)
        if "is running" in line:
            return
    raise StartError("".join(said))


async def run(url: str, clients: Sequence[Turns]) -> dict[str, float]:
    """Run the turns of each client one after the other, CLIENTS clients at a time."""
    todo, ttfts, generated = iter(clients), list[float](), 0
    prompts = cached = 0
    async with httpx2.AsyncClient(base_url=url, timeout=START) as http:
        while not (await http.get("/health")).is_success:  # until the front knows of the first replica
            await asyncio.sleep(0.1)
        model = (await http.get("/v1/models")).json()["data"][0]["id"]

        async def client() -> None:
            nonlocal generated, prompts, cached
            for turns in todo:
                prompt: list[int] = []
                for added in turns:
                    prompt += added
                    ttft, answer, usage = await ask(http, model, prompt)
                    ttfts.append(ttft)
                    generated += usage["completion_tokens"]
                    prompts += usage["prompt_tokens"]
                    cached += usage["prompt_tokens_details"]["cached_tokens"]
                    prompt += answer

        begin = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for _ in range(CLIENTS):
                group.create_task(client())
        seconds = time.perf_counter() - begin
    return {
        "hit_rate": cached / prompts,
        "ttft_p50_ms": 1e3 * percentile(ttfts, 50),
        "ttft_p99_ms": 1e3 * percentile(ttfts, 99),
        "output_tokens_per_second": generated / seconds,
        "requests": len(ttfts),
    }


async def ask(http: httpx2.AsyncClient, model: str, prompt: list[int]) -> tuple[float, list[int], dict[str, Any]]:
    """The seconds to the first token, the tokens of the answer, and the usage."""
    body: dict[str, Any] = {"model": model, "prompt": prompt, "max_tokens": ANSWER, "temperature": 0}
    body |= {"ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True}
    begin, first, answer, usage = time.perf_counter(), 0.0, list[int](), dict[str, Any]()
    async with http.stream("POST", "/v1/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line[6:])
            if "error" in event:
                raise RuntimeError(event["error"])
            usage = event.get("usage") or usage
            for choice in event["choices"]:
                first = first or time.perf_counter() - begin
                answer += choice.get("token_ids") or ()
    return first, answer, usage

"""`nanoserve bench serve` beside `vllm bench serve` on one server: do two load generators measure the same?

Both send requests of one length at one even rate, and take turns; the median of the rounds counts. vLLM is in the
environment that peers/setup.sh makes, and only its client runs. The names are the same, and what each said is kept.
The first server has a clock and no model: its first token comes after 100 ms and the others every 20, so that what both
should say is known. The second is this one with the bundled model, which shares its cores with the clients.
"""

import asyncio
import json
import multiprocessing
import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

import uvloop
from rich.console import Console

from phase0_request.lab.report import at_least_one, finish, parser, table
from phase0_request.tokenizer import BUNDLED
from phase6_integration.lab.bench import Bench
from phase6_integration.lab.peers.compare import interpreter
from phase6_integration.load.client import LoadTest, run
from phase6_integration.load.workload import Workload

INPUT, OUTPUT = 128, 64  # tokens of a prompt and of an answer
FIRST, GAP = 0.1, 0.02  # seconds, of the server with a clock
RATE, REQUESTS = 8.0, 64
EVEN = 1e6  # burstiness: all gaps are alike
CLIENT = """
import argparse
from vllm.benchmarks.serve import add_cli_args, main
parser = argparse.ArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""  # what `vllm bench serve` does, which the build for CPUs does not start: it looks for a package of another name
NAMES = [
    *("request_throughput", "output_throughput", "total_token_throughput"),
    *(f"{statistic}_{name}_ms" for name in ("ttft", "tpot", "itl", "e2el") for statistic in ("mean", "median")),
]


def ours(url: str) -> dict[str, Any]:
    work = Workload(num_prompts=REQUESTS, request_rate=RATE, burstiness=EVEN, input_len=INPUT, output_len=OUTPUT)
    return uvloop.run(run(LoadTest(url=url, workload=work))).as_json()


def vllm(url: str, seed: int) -> dict[str, Any]:
    """What it saves, without lists of nothing."""
    given = {
        "--backend": "openai", "--base-url": url, "--endpoint": "/v1/completions", "--model": BUNDLED.name,
        "--tokenizer": BUNDLED, "--dataset-name": "random", "--random-input-len": INPUT, "--random-output-len": OUTPUT,
        "--num-prompts": REQUESTS, "--request-rate": RATE, "--burstiness": EVEN, "--seed": seed, "--temperature": 0,
        "--percentile-metrics": "ttft,tpot,itl,e2el", "--result-filename": "vllm.json",
    }  # fmt: skip
    words = [str(word) for pair in given.items() for word in pair]
    with tempfile.TemporaryDirectory() as folder:
        command = [
            str(interpreter("vllm", "native")),
            "-c",
            CLIENT,
            *words,
            "--ignore-eos",
            "--save-result",
            "--result-dir",
            folder,
        ]
        quiet = os.environ | {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
        done = subprocess.run([*command, "--disable-tqdm"], capture_output=True, text=True, env=quiet)
        if done.returncode:
            raise RuntimeError(done.stderr[-2000:])
        saved: dict[str, Any] = json.loads((Path(folder) / "vllm.json").read_text("utf-8"))
    return {name: value for name, value in saved.items() if not isinstance(value, list) and name != "tokenizer_id"}


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """All requests of a connection. Each token has its time, so that late timers do not add up."""
    loop = asyncio.get_running_loop()

    def event(content: object) -> None:
        text = f"data: {content if isinstance(content, str) else json.dumps(content)}\n\n".encode()
        writer.write(f"{len(text):x}\r\n".encode() + text + b"\r\n")

    try:
        while True:
            head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
            if head.startswith("get"):
                models = json.dumps({"data": [{"id": BUNDLED.name}]}).encode()
                writer.write(f"HTTP/1.1 200 OK\r\ncontent-length: {len(models)}\r\n\r\n".encode() + models)
                continue
            body = json.loads(await reader.readexactly(int(head.split("content-length:")[1].split()[0])))
            due = loop.time() + FIRST
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
            for left in range(body.get("max_tokens", 1) - 1, -1, -1):
                await asyncio.sleep(due - loop.time())
                event({"choices": [{"index": 0, "text": "a ", "finish_reason": None if left else "length"}]})
                due += GAP
            event({"choices": [], "usage": {"prompt_tokens": INPUT, "completion_tokens": body.get("max_tokens", 1)}})
            event("[DONE]")
            writer.write(b"0\r\n\r\n")
    except (asyncio.IncompleteReadError, ConnectionError):
        writer.close()


def serve(told: Connection) -> None:
    async def forever() -> None:
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        told.send(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    asyncio.run(forever())


@contextmanager
def clock() -> Iterator[str]:
    """The server with a clock, in a process of its own."""
    context = multiprocessing.get_context("spawn")
    mine, its = context.Pipe()
    process = context.Process(target=serve, args=(its,), daemon=True)
    process.start()
    try:
        yield f"http://127.0.0.1:{mine.recv()}"
    finally:
        process.terminate()
        process.join()


def main(arguments: list[str] | None = None) -> int:
    p = parser("phase6_integration.lab load_check", __doc__)
    p.add_argument("--rounds", type=at_least_one, default=3, help="of each (%(default)s)")
    options, console = p.parse_args(arguments), Console(highlight=False)
    figures: dict[str, Any] = {}
    for name, server in {"clock": clock(), "bundled_model": Bench(str(BUNDLED), 1, 0, 64, 1).served()}.items():
        rounds: dict[str, list[dict[str, Any]]] = {"ours": [], "vllm": []}
        with server as url:
            for number in range(options.rounds):
                rounds["ours"].append(ours(url))
                rounds["vllm"].append(vllm(url, number))
        both = {figure: [median(each[figure] for each in its) for its in rounds.values()] for figure in NAMES}
        medians = {figure: {"ours": a, "vllm": b, "difference": a / b - 1} for figure, (a, b) in both.items()}
        figures[name] = {"medians": medians, "rounds": rounds}
        rows = [(figure, each["ours"], each["vllm"], 100 * each["difference"]) for figure, each in medians.items()]
        console.print(table((name, "ours", "vLLM's", "difference, %"), rows, 2), "")
    finish(p, options, arguments, figures)
    return 0

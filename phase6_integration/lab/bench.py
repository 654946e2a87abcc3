"""What HTTP costs: the throughput of one trace offline and through the server, and the latencies that clients see.

Offline, the engine has all requests at once. The server has a number of clients, and each sends its next request when
it has its answer. On a CPU the clients and the HTTP server take processor time from the engine: the worst case.
"""

import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import uvloop
from rich.console import Console
from rich.progress import track

from phase0_request.lab.report import finish, parser, table
from phase0_request.params import SamplingParams
from phase0_request.support import entry
from phase0_request.tokenizer import BUNDLED
from phase2_prefill_decode.model import default_device
from phase6_integration.engine.engine import NanoServingEngine
from phase6_integration.load.client import LoadTest, run
from phase6_integration.load.report import Report
from phase6_integration.load.workload import Workload

STARTUP = 600.0  # seconds for a model to load


@dataclass(frozen=True, slots=True)
class Bench:
    """One model, one trace, one number of engine threads."""

    model: str
    threads: int
    requests: int
    running: int
    runs: int

    def workload(self, requests: int) -> Workload:
        return Workload(num_prompts=requests, input_len=64, output_len=64, spread=1.0, max_input_len=512, seed=0)

    def offline(self) -> float:
        """Tokens per second of the engine alone; the best of the runs."""
        works = [turn for session in self.workload(self.requests).sessions() for turn in session.turns]
        prompts = [work.prompt for work in works]
        params = [SamplingParams(max_tokens=work.max_tokens, temperature=0, ignore_eos=True) for work in works]
        best = 0.0
        with NanoServingEngine.from_pretrained(
            self.model, max_num_seqs=self.running, enable_prefix_caching=False, threads=self.threads
        ) as engine:
            engine.generate(prompts[: self.running], params[: self.running], progress=False)
            for _ in range(self.runs):
                start = time.perf_counter()
                answers = engine.generate(prompts, params, progress=False)
                seconds = time.perf_counter() - start
                best = max(best, sum(len(answer.output_tokens) for answer in answers) / seconds)
        return best

    @contextmanager
    def served(self) -> Iterator[str]:
        """Run a server of this model; its URL."""
        flags = [self.model, "--port", "0", "--threads", f"{self.threads}", "--max-num-seqs", f"{self.running}"]
        with tempfile.TemporaryFile("w+") as log:
            command = [sys.executable, "-m", "phase6_integration.cli", "serve", *flags, "--no-enable-prefix-caching"]
            server = subprocess.Popen(command, stderr=log, stdout=log, env=entry.environment())
            try:
                yield _address(server, log)
            finally:
                server.terminate()
                server.wait()

    def through_http(self, url: str, clients: int, stream: bool) -> Report:
        """The best of the runs. Fewer clients send fewer requests, so that all runs take about as long."""
        requests = max(self.requests * clients // self.running, 4 * clients)
        load = LoadTest(
            url=url,
            workload=self.workload(min(requests, self.requests)),
            concurrency=clients,
            stream=stream,
            warmups=2,
        )
        return max((uvloop.run(run(load)) for _ in range(self.runs)), key=lambda report: report.output_throughput)


def _address(server: subprocess.Popen[bytes], log: Any) -> str:
    """Wait until the server logs that it is ready; return the URL from that line."""
    deadline = time.monotonic() + STARTUP
    while time.monotonic() < deadline and server.poll() is None:
        log.seek(0)
        text = log.read()
        if found := re.search(r"message=ready url=(\S+)", text):
            return found[1]
        time.sleep(0.1)
    raise RuntimeError(f"the server did not start: {text}")


def measure(bench: Bench, clients: list[int], console: Console) -> dict[str, Any]:
    cases = [(many, stream) for stream in (True, False) for many in clients]
    with bench.served() as url:
        found = {
            f"{'streamed' if stream else 'whole'}_{many}": bench.through_http(url, many, stream)
            for many, stream in track(cases, f"{bench.threads} threads", console=console, transient=True)
        }
    offline = bench.offline()  # last: this process would keep the memory of a GPU
    rows = []
    for (many, stream), report in zip(cases, found.values(), strict=True):
        seen = [report.latencies[f"{q}_{what}_ms"] for what in ("ttft", "itl") for q in ("p50", "p99")]
        rate = report.output_throughput
        rows.append(("streamed" if stream else "whole", many, rate, 100 * rate / offline, *(ms or "" for ms in seen)))
    console.print(f"{bench.threads} threads; offline, {bench.running} running: {offline:,.0f} tokens/s; times in ms")
    names = ("", "clients", "tokens/s", "% of offline", "TTFT p50", "p99", "ITL p50", "p99")
    console.print(table(names, rows))
    return {
        "offline": offline,
        "http": {
            name: report.as_json() | {"share": report.output_throughput / offline} for name, report in found.items()
        },
    }


def main(arguments: list[str] | None = None) -> int:
    p = parser("phase6_integration.lab bench", __doc__)
    p.add_argument("--model", default=str(BUNDLED), help="a model's directory (the bundled one)")
    p.add_argument("--threads", type=int, nargs="+", default=[1], help="of the engine; several are compared (1)")
    p.add_argument("--requests", type=int, default=512, help="in the trace (512)")
    p.add_argument("--clients", type=int, nargs="+", default=[1, 4, 16, 64], help="at once (1 4 16 64)")
    p.add_argument("--runs", type=int, default=3, help="of which the best counts (3)")
    options, console, figures = p.parse_args(arguments), Console(highlight=False), dict[str, Any]()
    for threads in options.threads:
        bench = Bench(options.model, threads, options.requests, max(options.clients), options.runs)
        figures[f"threads_{threads}"] = measure(bench, sorted(options.clients), console)
    finish(p, options, arguments, figures, gpu=default_device().type == "cuda")
    return 0

"""Drive one server by a closed and by an open loop, with the same requests.

In a closed loop each of some clients sends its next request when it has an answer: a server that falls behind is asked
less. In an open loop requests come at random, however long the earlier ones take. First they come at the mean rate that
the closed loop has just reached, for each number of clients; then at half as much again as the most clients reached.
"""

from dataclasses import dataclass, replace
from typing import Any

import uvloop
from rich.console import Console

from phase0_request.lab.report import finish, parser, table
from phase0_request.tokenizer import BUNDLED
from phase2_prefill_decode.model import default_device
from phase6_integration.lab.bench import Bench
from phase6_integration.load.client import LoadTest, run
from phase6_integration.load.report import Report

SHOWN = "p50_ttft_ms", "p99_ttft_ms"
BEYOND = 1.5  # times the rate that the most clients reach


@dataclass(frozen=True, slots=True)
class Pair:
    """A number of clients in a closed loop, and the open loop at the rate that they reached."""

    clients: int
    closed: Report
    open: Report

    def as_json(self) -> dict[str, Any]:
        loops = {"closed": seen(self.closed), "open": seen(self.open)}
        return {"clients": self.clients, "rate": self.closed.request_throughput, **loops}


def seen(report: Report) -> dict[str, float | None]:
    return {name: report.latencies[name] for name in SHOWN}


def closed_loop(bench: Bench, url: str, clients: int) -> Report:
    work = bench.workload(bench.requests)
    return uvloop.run(run(LoadTest(url=url, workload=work, concurrency=clients, warmups=2)))


def open_loop(bench: Bench, url: str, rate: float) -> Report:
    work = replace(bench.workload(bench.requests), request_rate=rate)
    return uvloop.run(run(LoadTest(url=url, workload=work, warmups=2)))


def compare(bench: Bench, url: str, clients: int) -> Pair:
    closed = closed_loop(bench, url, clients)
    return Pair(clients, closed, open_loop(bench, url, closed.request_throughput))


def main(arguments: list[str] | None = None) -> int:
    p = parser("phase6_integration.lab scale.loops", __doc__)
    p.add_argument("--model", default=str(BUNDLED), help="a model's directory (the bundled one)")
    p.add_argument("--requests", type=int, default=512, help="of each loop (512)")
    p.add_argument("--clients", type=int, nargs="+", default=[4, 16, 64], help="of the closed loop (4 16 64)")
    p.add_argument("--running", type=int, default=64, help="requests that the server runs at once (64)")
    options, console = p.parse_args(arguments), Console(highlight=False)
    bench = Bench(options.model, 1, options.requests, options.running, 1)
    with bench.served() as url:
        pairs = [compare(bench, url, clients) for clients in sorted(options.clients)]
        rate = BEYOND * pairs[-1].closed.request_throughput
        beyond = open_loop(bench, url, rate)
    rows: list[tuple[object, ...]] = []
    for pair in pairs:
        times = [seen(loop)[name] or "" for name in SHOWN for loop in (pair.closed, pair.open)]
        rows.append((pair.clients, pair.closed.request_throughput, *times))
    rows.append(("any", rate, "", beyond.latencies[SHOWN[0]] or "", "", beyond.latencies[SHOWN[1]] or ""))
    names = ("clients", "requests/s", "TTFT p50, closed", "open", "TTFT p99, closed", "open")
    console.print(table(names, rows))
    figures: dict[str, Any] = {f"clients_{pair.clients}": pair.as_json() for pair in pairs}
    figures["beyond"] = {"rate": rate, "open": seen(beyond)}
    finish(p, options, arguments, figures, gpu=default_device().type == "cuda")
    return 0

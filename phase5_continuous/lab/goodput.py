"""`python -m phase5_continuous.lab goodput`: the requests that meet their SLO at each rate of arrivals, simulated.

Above a machine's capacity the queue grows as long as requests arrive, and goodput depends on how long that is. So they
arrive for the same time at every rate. The figures are the same on every machine.
"""

import argparse
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from phase0_request.lab.record import record
from phase5_continuous.lab.report import side_by_side
from phase5_continuous.lab.simulator import WAYS, Setting, simulate
from phase5_continuous.lab.traces import Trace

SECONDS = 60
RATES = (25, 50, 100, 150, 200, 250)
READERS, PAGES = 56, 4096  # questions a second about documents, of which more exist than fit into the pages
PREFIX_WAYS = ("fcfs", "longest-prefix")


@dataclass(frozen=True, slots=True)
class Point:
    """One way to serve at one rate of arrivals."""

    requests: int
    kept: float  # the share of all requests that met the SLO
    goodput: float  # requests a second that met it
    ttft_p50_ms: float
    ttft_p99_ms: float
    longest_wait_ms: float
    itl_p99_ms: float
    computed: float  # the share of the prompts' tokens that were computed, and not found in the cache


def point(trace: Trace, setting: Setting) -> Point:
    o = simulate(trace.arrivals(), setting)
    return Point(
        requests=trace.requests,
        kept=o.attainment,
        goodput=trace.rate * o.attainment,
        ttft_p50_ms=1e3 * o.ttft_p50,
        ttft_p99_ms=1e3 * o.ttft_p99,
        longest_wait_ms=1e3 * o.queue_max,
        itl_p99_ms=1e3 * o.itl_p99,
        computed=o.prefill_tokens / o.prompt_tokens,
    )


def poisson(way: str, rate: int, seconds: int) -> Point:
    """Prompts that share no prefix."""
    return point(Trace(requests=rate * seconds, rate=rate), Setting(way=way))


def documents(way: str, seconds: int) -> Point:
    """Questions about documents: a prefix that many prompts share, if it is still cached."""
    return point(Trace(kind="documents", requests=READERS * seconds, rate=READERS), Setting(way=way, pages=PAGES))


def show(console: Console, rates: dict[str, dict[int, Point]], readers: dict[str, Point]) -> None:
    console.print("Requests a second that met the SLO, by the rate of arrivals")
    found = {way: [f"{one.goodput:.1f}" for one in points.values()] for way, points in rates.items()}
    console.print(side_by_side("", [f"{rate}" for rate in RATES], found))
    console.print(f"\nQuestions about documents, {READERS} a second; times in ms")
    names = ("met SLO", "TTFT p50", "p99", "longest wait", "computed")
    figures = {
        way: [
            f"{one.goodput:.1f}",
            *(f"{ms:,.0f}" for ms in (one.ttft_p50_ms, one.ttft_p99_ms, one.longest_wait_ms)),
            f"{one.computed:.0%}",
        ]
        for way, one in readers.items()
    }
    console.print(side_by_side("", names, figures))


def main(arguments: list[str] | None = None) -> int:
    p = argparse.ArgumentParser(prog="python -m phase5_continuous.lab goodput", description=__doc__)
    p.add_argument("--seconds", type=int, default=SECONDS, help="for which requests arrive (%(default)s)")
    p.add_argument("--json", type=Path, metavar="FILE", help="write the figures here")
    options, console = p.parse_args(arguments), Console()
    seconds = options.seconds
    if seconds < 1:
        p.error(f"seconds must be at least 1, got {seconds}")
    rates: dict[str, dict[int, Point]] = {way: {} for way in WAYS}
    try:
        with Progress(console=console, transient=True) as bar:
            for way, rate in bar.track([(way, rate) for way in WAYS for rate in RATES], description="goodput"):
                rates[way][rate] = poisson(way, rate, seconds)
        readers = {way: documents(way, seconds) for way in PREFIX_WAYS}
    except KeyboardInterrupt:
        console.print("Stopped.")
        return 130
    show(console, rates, readers)
    if options.json is not None:
        figures = {
            "seconds": seconds,
            "poisson": {way: {f"rate_{rate}": asdict(one) for rate, one in rates[way].items()} for way in rates},
            "documents": {way: asdict(one) for way, one in readers.items()},
        }
        record(options.json, f"{p.prog} --seconds {seconds}", figures)
        console.print(f"\nFigures written to {options.json}")
    return 0

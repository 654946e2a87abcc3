"""`python -m phase5_continuous.lab goodput`: the requests that meet their SLO at each rate of arrivals, simulated.

Above a machine's capacity the queue grows as long as requests arrive, and goodput depends on how long that is. So they
arrive for the same time at every rate. The figures are the same on every machine.
"""

import argparse
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from phase0_request.machine import record
from phase5_continuous.lab.report import side_by_side
from phase5_continuous.lab.simulator import WAYS, Setting, simulate
from phase5_continuous.lab.traces import Trace

SECONDS = 120
RATES = (25, 50, 100, 150, 200, 250)
CHATS, CONCURRENT = 50, 32  # arrivals a second, and running requests: some have to wait
CHAT_WAYS = ("fcfs", "longest-prefix")


@dataclass(frozen=True, slots=True)
class Point:
    """One way to serve at one rate of arrivals."""

    requests: int
    kept: float  # the share of all requests that met the SLO
    goodput: float  # requests a second that met it
    ttft_p50_ms: float
    ttft_p99_ms: float
    longest_wait_ms: float


def point(trace: Trace, setting: Setting) -> Point:
    o = simulate(trace.arrivals(), setting)
    times = (1e3 * seconds for seconds in (o.ttft_p50, o.ttft_p99, o.queue_max))
    return Point(trace.requests, o.attainment, trace.rate * o.attainment, *times)


def poisson(way: str, rate: int, seconds: int) -> Point:
    """Prompts that share no prefix."""
    return point(Trace(requests=rate * seconds, rate=rate), Setting(way=way))


def chat(way: str, seconds: int) -> Point:
    """Prompts that repeat the conversation so far."""
    return point(Trace(kind="chat", requests=CHATS * seconds, rate=CHATS), Setting(way=way, max_running=CONCURRENT))


def show(console: Console, rates: dict[str, dict[int, Point]], chats: dict[str, Point]) -> None:
    console.print("Requests a second that met the SLO, by the rate of arrivals")
    found = {way: [f"{one.goodput:.1f}" for one in points.values()] for way, points in rates.items()}
    console.print(side_by_side("", [f"{rate}" for rate in RATES], found))
    console.print(f"\nChats, {CHATS} requests a second, {CONCURRENT} at once; times in ms")
    names = ("met SLO", "TTFT p50", "p99", "longest wait")
    figures = {
        way: [f"{one.goodput:.1f}", *(f"{ms:,.0f}" for ms in (one.ttft_p50_ms, one.ttft_p99_ms, one.longest_wait_ms))]
        for way, one in chats.items()
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
        chats = {way: chat(way, seconds) for way in CHAT_WAYS}
    except KeyboardInterrupt:
        console.print("Stopped.")
        return 130
    show(console, rates, chats)
    if options.json is not None:
        figures = {
            "seconds": seconds,
            "poisson": {way: {f"rate_{rate}": asdict(one) for rate, one in rates[way].items()} for way in rates},
            "chat": {way: asdict(one) for way, one in chats.items()},
        }
        record(options.json, f"{p.prog} --seconds {seconds}", figures)
        console.print(f"\nFigures written to {options.json}")
    return 0

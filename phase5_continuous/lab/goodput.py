"""`python -m phase5_continuous.lab goodput`: the requests that meet their SLO at each rate of arrivals, simulated.

Above a machine's capacity the queue grows as long as requests arrive, and goodput depends on how long that is. So they
arrive for the same time at every rate. The figures are the same on every machine.
"""

from dataclasses import asdict, dataclass
from itertools import product

from rich.console import Console
from rich.progress import track

from phase0_request.lab.report import finish, parser, section, table
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


def main(arguments: list[str] | None = None) -> int:
    p = parser("phase5_continuous.lab goodput", __doc__)
    p.add_argument("--seconds", type=int, default=SECONDS, help="for which requests arrive (%(default)s)")
    options, console = p.parse_args(arguments), Console(highlight=False)
    seconds = options.seconds
    if seconds < 1:
        p.error(f"seconds must be at least 1, got {seconds}")
    rates: dict[str, dict[int, Point]] = {way: {} for way in WAYS}
    for way, rate in track(list(product(WAYS, RATES)), "goodput", console=console, transient=True):
        rates[way][rate] = poisson(way, rate, seconds)
    readers = {way: documents(way, seconds) for way in PREFIX_WAYS}
    console.print("Requests a second that met the SLO, by the rate of arrivals")
    rows = [(way, *(point.goodput for point in points.values())) for way, points in rates.items()]
    console.print(table(("", *map(str, RATES)), rows), "")
    title = f"Questions about documents, {READERS} a second"
    figures = {
        "seconds": seconds,
        "poisson": {way: {f"rate_{rate}": asdict(row) for rate, row in rates[way].items()} for way in rates},
        "documents": section(console, title, readers, digits=2),
    }
    finish(p, options, arguments, figures)
    return 0

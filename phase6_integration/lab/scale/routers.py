"""`python -m phase6_integration.lab scale.routers`: routers for a thousand replicas, compared in simulation.

Five routers serve the same traces: at random, in turn, the least loaded replica, an approximate tree of the texts that
were sent to each replica, and digests of what each has cached. First a few replicas are simulated twice, by phase 5's
simulator with the engine's own scheduler, cache and `rank`, and by the compiled model that the rest uses.
"""

import random
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.progress import track

from phase0_request.lab.report import at_least_one, finish, parser, section
from phase0_request.support.machine import cores
from phase4_radix.prefix_cache import PrefixCache
from phase5_continuous.lab.simulator import Setting, Simulation
from phase5_continuous.lab.stats import SLO, Stats
from phase5_continuous.lab.traces import request as request_of
from phase6_integration.cluster.routing import RoutingPolicy, rank
from phase6_integration.lab.scale import fleet
from phase6_integration.lab.scale.traces import KINDS, LONGEST_ANSWER, Kind, arrivals

PAGES = 24_576  # of 16 tokens: the memory that an H100 has beside the weights of an 8B model in bfloat16
PERIOD = 0.5  # seconds between two reports
GOAL = SLO()
ROUTERS = fleet.ROUTERS
LARGE = ROUTERS[2:]  # in the large run
LOADS = {  # requests a second of each replica
    "conversations": (8, 12, 16, 20, 24),
    "shared_prompts": (20, 40, 60, 80, 100),
    "tenants": (8, 12, 16, 20, 24),
    "nothing_shared": (10, 20, 30, 40, 50),
}
BUSY = 20.0  # of the other runs
PERIODS, POOLS, FRONTS = (0.0, 0.5, 2.0, 10.0, 60.0), (8192, 16_384, 24_576, 49_152), (1, 4, 16)
FEWER, SECONDS = 32, 200  # replicas, and how long requests arrive, in all but the large run


class Size(NamedTuple):
    replicas: int
    requests: int
    rate: float  # requests a second of each replica
    pages: int


SMALL = Size(4, 2000, 12.0, 8192)  # simulated twice


@dataclass(frozen=True, slots=True)
class Point:
    """A router on a trace, without its first quarter."""

    hit_rate: float  # tokens of prompts found in a cache
    expected: float  # the share that the router expected
    ttft_p50_ms: float
    ttft_p99_ms: float
    met: float  # the share of requests with a TTFT up to a second, and on average 25 ms from token to token
    tokens_per_second: float  # of a replica
    imbalance: float  # the highest load over the average


def parts(setting: Setting) -> Any:
    """The step times of a setting as an array: the slopes of each part, and the overhead as one more."""
    times = setting.times()
    overhead = ([times.overhead, 0, 0, 0, 0, 0], [0.0] * 6)
    made = np.array([[*each, overhead] for each in times._parts])
    made[..., 2:4] *= times.load([(0, 1)]).pairs  # pairs and keys are counted in one layer
    return made


def run(
    kind: Kind, router: str, replicas: int, requests: int, rate: float,
    pages: int = PAGES, *, routers: int = 1, period: float = PERIOD, skipped: float = 0.25,
) -> Point:  # fmt: skip
    """Simulate a fleet. `rate` is per replica."""
    rows, warm = kind.rows(requests, rate * replicas), int(requests * skipped)
    state = fleet.fleet(rows, replicas, pages, kind.shared, kind.prefixes, parts(Setting()))
    generated = fleet.serve(state, ROUTERS.index(router), routers, period, 0, warm)
    _, samples, total = state.sums
    return point(rows[warm:], generated / replicas, total / samples)


def point(rows: Any, generated: float, imbalance: float) -> Point:
    met = (rows.ttft <= GOAL.ttft) & (rows.tpot <= GOAL.gap)
    tokens = rows.prompt.sum()
    p50, p99 = np.percentile(1e3 * rows.ttft, (50, 99))
    seconds = rows.time[-1] - rows.time[0]
    values = rows.hit.sum() / tokens, rows.expected.sum() / tokens, p50, p99, met.mean(), generated / seconds, imbalance
    return Point(*map(float, values))


def with_schedulers(rows: Any, shared: int, router: str, count: int, pages: int) -> dict[str, float]:
    """A small fleet with the engine's scheduler and prefix cache in every replica, and the router's own function."""
    setting, stats, draw, ratios = Setting(pages=pages, max_tokens=LONGEST_ANSWER), Stats(), random.Random(0), []
    replicas = [Simulation((), setting) for _ in range(count)]
    for replica in replicas:
        replica.stats = stats
    for number, arrival in enumerate(arrivals(rows, shared)):
        for replica in replicas:
            while replica.core.has_work and replica.clock.now <= arrival.time:
                replica.step()
        loads = [len(replica.runner.answers) for replica in replicas]
        request = request_of(number, arrival, setting.max_tokens)
        caches = [replica.scheduler.cache for replica in replicas]
        hits = [cache.cached_tokens(request) for cache in caches if isinstance(cache, PrefixCache)]
        match router:
            case "random":
                chosen = draw.randrange(count)
            case "least loaded":
                chosen = min(draw.sample(range(count), count), key=loads.__getitem__)
            case _:
                chosen = rank(loads, hits, request.total, RoutingPolicy(), draw)[0]
        replicas[chosen].clock.now = max(replicas[chosen].clock.now, arrival.time)
        replicas[chosen].submit(arrival)
        ratios.append(max(loads) / max(float(np.mean(loads)), 1))
    for replica in replicas:
        while replica.core.has_work:
            replica.step()
    outcome = stats.outcome(arrival.time, 0)
    return {
        "hit_rate": 1 - outcome.prefill_tokens / outcome.prompt_tokens,
        "ttft_p50_ms": 1e3 * outcome.ttft_p50,
        "ttft_p99_ms": 1e3 * outcome.ttft_p99,
        "imbalance": float(np.mean(ratios)),
    }


def calibrate() -> dict[str, dict[str, Any]]:
    """A small fleet by both simulators."""
    rows = {}
    for name, router in product(("conversations", "tenants"), ("random", "least loaded", "digests")):
        kind = KINDS[name]
        compiled = run(kind, router, SMALL.replicas, SMALL.requests, SMALL.rate, SMALL.pages, period=0.0, skipped=0.0)
        trace = kind.rows(SMALL.requests, SMALL.rate * SMALL.replicas)
        full = with_schedulers(trace, kind.shared, router, SMALL.replicas, SMALL.pages)
        key = f"{name}_{router.replace(' ', '_')}"
        rows[key] = {"scheduler": full, "compiled": {figure: getattr(compiled, figure) for figure in full}}
    return rows


def compared(
    name: str, rate: float, replicas: int, requests: int, routers: Sequence[str] = ROUTERS
) -> dict[str, dict[str, Any]]:
    """Routers on one trace, with the processor time of each simulation. The compiled loops run side by side."""

    def timed(router: str) -> dict[str, Any]:
        began = time.thread_time()
        figures = asdict(run(KINDS[name], router, replicas, requests, rate))
        return {**figures, "took_seconds": time.thread_time() - began}

    with ThreadPoolExecutor(cores()) as pool:
        return dict(zip((router.replace(" ", "_") for router in routers), pool.map(timed, routers), strict=True))


def main(arguments: list[str] | None = None) -> int:
    p = parser("phase6_integration.lab scale.routers", __doc__)
    p.add_argument("--replicas", type=at_least_one, default=1000, help="of the large run (%(default)s)")
    p.add_argument("-n", "--requests", type=at_least_one, default=10_000_000, help="of the large run (%(default)s)")
    p.add_argument(
        "--only-large", nargs="+", choices=[each.replace(" ", "_") for each in ROUTERS], metavar="ROUTER",
        help="no loads, and these routers in the large run: %(choices)s",
    )  # fmt: skip
    options, console = p.parse_args(arguments), Console(highlight=False)
    names = [each for each in ROUTERS if each.replace(" ", "_") in options.only_large] if options.only_large else LARGE
    figures: dict[str, Any] = {"requests": options.requests, "replicas": options.replicas, "small": calibrate()}
    for key, both in figures["small"].items():
        section(console, f"Simulated twice: {key}", both, 2)
    figures["large"] = compared("conversations", BUSY, options.replicas, options.requests, names)
    title = f"{options.replicas:,} replicas, {options.requests:,} requests in conversations, {BUSY:g} a second of each"
    section(console, title, figures["large"], 2)
    if options.only_large:
        finish(p, options, arguments, figures, console=console)
        return 0
    loads: dict[str, dict[str, Any]] = {}
    for name, rate in track([(n, r) for n in LOADS for r in LOADS[n]], "loads", console=console, transient=True):
        at_rate = compared(name, rate, FEWER, round(rate * FEWER * SECONDS))
        loads.setdefault(name, {})[f"rate_{rate}"] = at_rate
    figures["loads"] = loads
    for name, rates in loads.items():
        for key, rows in rates.items():
            section(console, f"{name}, {key}", rows, 2)
    steady, requests = KINDS["tenants"], round(BUSY * FEWER * SECONDS)

    def trees(pages: int = PAGES, **given: int) -> dict[str, dict[str, Any]]:
        return {
            router.replace(" ", "_"): asdict(run(steady, router, FEWER, requests, BUSY, pages, **given))
            for router in ("approximate tree", "digests")
        }

    periods = {
        f"seconds_{period:g}": asdict(run(steady, "digests", FEWER, requests, BUSY, period=period))
        for period in PERIODS
    }
    figures["periods"] = section(console, "Tenants: digests, by the seconds between two reports", periods, 2)
    figures["pools"] = {f"pages_{pages}": trees(pages) for pages in POOLS}
    figures["fronts"] = {f"routers_{count}": trees(routers=count) for count in FRONTS}
    for key, rows in (figures["pools"] | figures["fronts"]).items():
        section(console, f"Tenants: {key}", rows, 2)
    finish(p, options, arguments, figures, console=console)
    return 0

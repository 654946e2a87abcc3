"""`python -m phase5_continuous.lab bench`: what scheduling costs.

Measures the host time of plan and commit while all requests decode in every step, with a model that takes no time. A
GPU would wait that long between two steps if the host did not run ahead.
"""

import cProfile
import random
import statistics
from dataclasses import dataclass
from functools import partial
from itertools import islice, product

from rich.console import Console
from rich.progress import track

from phase0_request.batch import StepOutput
from phase0_request.core import EngineCore
from phase0_request.lab.bench import InstantRunner
from phase0_request.lab.report import finish, parser, section, table
from phase0_request.params import SamplingParams
from phase0_request.request import Request
from phase1_kv_pool.cache import PagedCache
from phase3_chunked_prefill.budget import TokenBudget
from phase4_radix.prefix_cache import PrefixCache
from phase5_continuous.connect import turns
from phase5_continuous.scheduler import Scheduler

EOS = 0
RUNNING = (1, 16, 64, 256, 1024)
CACHES: dict[str, type[PagedCache]] = {"plain": PagedCache, "prefix": PrefixCache}
PAGE_SIZE = 16
PROMPT = 256  # tokens
PROFILED = 10  # functions
PROFILED_STEPS = 100


@dataclass(frozen=True, slots=True)
class Steady:
    """Microseconds per running request and step: medians over the steps, and the fastest step."""

    cache: str
    running: int
    plan_us: float
    commit_us: float
    sum_us: float
    best_us: float


def decoding(cache_type: type[PagedCache], running: int, steps: int) -> EngineCore[Scheduler, StepOutput]:
    """Return a loop with requests that have all computed their prompts, and will not end within this many steps."""
    pages = running * (-(-(PROMPT + steps + 64) // PAGE_SIZE) + 1)
    cache = cache_type(pages + pages // 50, PAGE_SIZE)
    scheduler = Scheduler(cache, [EOS], TokenBudget(512, 8192), turns=turns(), max_running=running)
    core = EngineCore(scheduler, InstantRunner())
    rng = random.Random(0)
    for n in range(running):
        prompt = tuple(rng.choices(range(1, 1000), k=PROMPT - n % PAGE_SIZE))  # not all need a page in one step
        core.submit(Request(f"r{n}", prompt, SamplingParams(max_tokens=steps + 64)))
    while (step := core.step()) is None or (step.prefill_tokens, step.decode_tokens) != (0, running):
        pass
    return core


def steady(cache: str, running: int, steps: int = 64) -> Steady:
    done = list(islice(decoding(CACHES[cache], running, steps).run(), steps))
    plans, commits = ([1e6 * getattr(step, part) / running for step in done] for part in ("plan", "commit"))
    sums = [plan + commit for plan, commit in zip(plans, commits, strict=True)]
    median = statistics.median
    return Steady(cache, running, median(plans), median(commits), median(sums), min(sums))


def profile(running: int, steps: int) -> dict[str, float]:
    """The share of each function's own time in steady steps, those of the loop included, largest first. The profiler
    makes small functions look larger than they are."""
    core, watch = decoding(PagedCache, running, steps), cProfile.Profile()
    with watch:
        for _ in range(steps):
            core.step()
    own: dict[str, float] = {}
    for entry in watch.getstats():
        name = entry.code if isinstance(entry.code, str) else entry.code.co_qualname
        own[name] = own.get(name, 0.0) + entry.inlinetime
    total = sum(own.values())
    return {name: own[name] / total for name in sorted(own, key=lambda name: -own[name])[:PROFILED]}


def main(arguments: list[str] | None = None) -> int:
    p = parser("phase5_continuous.lab bench", __doc__)
    options, console = p.parse_args(arguments), Console(highlight=False)
    watch = partial(track, console=console, transient=True)
    steadies = [steady(cache, n) for cache, n in watch(list(product(CACHES, RUNNING)), "steady")]
    shares = profile(256, PROFILED_STEPS)
    title = "All requests decode, \u00b5s per running request and step: medians, and the fastest step"
    rows = section(console, title, {f"{row.cache}_{row.running}": row for row in steadies}, digits=2)
    console.print("Where the time goes, 256 running, plain cache: a function's own time, %")
    console.print(table(("function", "%"), [(name, share * 100) for name, share in shares.items()]))
    figures = {"steady": rows, "profile": shares}
    finish(p, options, arguments, figures)
    return 0

"""`python -m phase5_continuous.lab bench`: what scheduling costs.

Measures the host time of plan and commit, with a model that takes no time.

Steady: all requests decode in every step. A GPU would wait that long between two steps if the host did not run ahead.
Whole lives: requests arrive, are prefilled in chunks, decode and end, with their admission and their pages.
"""

import cProfile
import random
import statistics
from dataclasses import asdict, astuple, dataclass
from functools import partial
from itertools import islice, product

from rich.console import Console
from rich.progress import track

from phase0_request.batch import StepOutput
from phase0_request.core import EngineCore
from phase0_request.lab.bench import InstantRunner
from phase0_request.lab.report import finish, parser, table
from phase0_request.params import SamplingParams
from phase0_request.request import Request
from phase1_kv_pool.cache import PagedCache
from phase3_chunked_prefill.budget import TokenBudget
from phase4_radix.prefix_cache import PrefixCache
from phase5_continuous.scheduler import Scheduler

EOS = 0
RUNNING = (1, 16, 64, 256, 1024)
CACHES: dict[str, type[PagedCache]] = {"plain": PagedCache, "prefix": PrefixCache}
PAGE_SIZE = 16
PROMPT = 256  # tokens
LIVES = 2_000
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


@dataclass(frozen=True, slots=True)
class Lives:
    """Prompts of up to 512 tokens, answers of up to 128: microseconds per slice, and per request."""

    cache: str
    running: int  # at most
    slices: int
    slice_us: float
    request_us: float


def loop(cache: PagedCache, running: int) -> EngineCore[Scheduler, StepOutput]:
    """The loop with a scheduler and a model that takes no time."""
    return EngineCore(Scheduler(cache, [EOS], TokenBudget(512, 8192), max_running=running), InstantRunner())


def decoding(cache_type: type[PagedCache], running: int, steps: int) -> EngineCore[Scheduler, StepOutput]:
    """Return a loop with requests that have all computed their prompts, and will not end within so many steps."""
    pages = running * (-(-(PROMPT + steps + 64) // PAGE_SIZE) + 1)
    core = loop(cache_type(pages + pages // 50, PAGE_SIZE), running)
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


def lives(cache: str, running: int, requests: int) -> Lives:
    """Serve requests that all arrive at the start. The pool has room for all that may run: none is preempted."""
    rng, core = random.Random(0), loop(CACHES[cache](running * 41, PAGE_SIZE), running)
    for n in range(requests):
        prompt = tuple(rng.choices(range(1, 1000), k=rng.randint(1, 512)))
        core.submit(Request(f"r{n}", prompt, SamplingParams(max_tokens=rng.randint(1, 128))))
    seconds, slices = 0.0, 0
    for step in core.run():
        seconds += step.plan + step.commit
        slices += len(step.batch)
    return Lives(cache, running, slices, seconds / slices * 1e6, seconds / requests * 1e6)


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
    whole = [lives(cache, min(256, LIVES), LIVES) for cache in watch(list(CACHES), "whole lives")]
    shares = profile(256, PROFILED_STEPS)
    console.print("All requests decode, \u00b5s per running request and step: medians, and the fastest step")
    console.print(table(("cache", "running", "plan", "commit", "sum", "fastest"), map(astuple, steadies), digits=2))
    console.print(f"\nWhole lives of {LIVES:,} requests, \u00b5s")
    console.print(table(("cache", "running", "slices", "a slice", "a request"), map(astuple, whole), digits=2))
    console.print("\nWhere the time goes, 256 running, plain cache: a function's own time, %")
    console.print(table(("function", "%"), [(name, share * 100) for name, share in shares.items()]))
    figures = {
        "steady": {f"{row.cache}_{row.running}": asdict(row) for row in steadies},
        "lives": {row.cache: asdict(row) for row in whole},
        "profile": shares,
    }
    finish(p, options, arguments, figures)
    return 0

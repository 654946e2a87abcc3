"""`python -m phase5_continuous.lab bench`: what scheduling costs.

Measures the host time of plan and commit, with a model that takes no time.

Steady: all requests decode in every step. A GPU would wait that long between two steps if the host did not run ahead.
Whole lives: requests arrive, are prefilled in chunks, decode and end, with their admission and their pages.
"""

import cProfile
import random
import statistics
import time
from dataclasses import asdict, astuple, dataclass
from functools import partial
from itertools import product

from rich.console import Console
from rich.progress import track

from phase0_request.batch import Batch, StepOutput
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


def answer(batch: Batch) -> StepOutput:
    return StepOutput([7] * len(batch))


def scheduler(cache: PagedCache, running: int) -> Scheduler:
    return Scheduler(cache, [EOS], TokenBudget(512, 8192), max_running=running)


def decoding(cache_type: type[PagedCache], running: int, steps: int) -> Scheduler:
    """Return a scheduler with requests that have all computed their prompts, and will not end within so many steps."""
    pages = running * (-(-(PROMPT + steps + 64) // PAGE_SIZE) + 1)
    one = scheduler(cache_type(pages + pages // 50, PAGE_SIZE), running)
    rng = random.Random(0)
    for n in range(running):
        prompt = tuple(rng.choices(range(1, 1000), k=PROMPT - n % PAGE_SIZE))  # not all need a page in one step
        one.submit(Request(f"r{n}", prompt, SamplingParams(max_tokens=steps + 64)))
    while True:
        batch = one.plan(0)
        all_decode = batch.tokens_by_kind == (0, running)
        one.commit(batch, answer(batch), 0)
        if all_decode:
            return one


def steady(cache: str, running: int, steps: int = 64) -> Steady:
    one, clock = decoding(CACHES[cache], running, steps), time.perf_counter
    plans, commits = [], []
    for step in range(steps):
        start = clock()
        batch = one.plan(step)
        planned = clock()
        output = answer(batch)
        ran = clock()
        one.commit(batch, output, step)
        commits.append((clock() - ran) / running * 1e6)
        plans.append((planned - start) / running * 1e6)
    sums = [plan + commit for plan, commit in zip(plans, commits, strict=True)]
    median = statistics.median
    return Steady(cache, running, median(plans), median(commits), median(sums), min(sums))


def lives(cache: str, running: int, requests: int) -> Lives:
    """Serve requests that all arrive at the start. The pool has room for all that may run: none is preempted."""
    rng, one = random.Random(0), scheduler(CACHES[cache](running * 41, PAGE_SIZE), running)
    for n in range(requests):
        prompt = tuple(rng.choices(range(1, 1000), k=rng.randint(1, 512)))
        one.submit(Request(f"r{n}", prompt, SamplingParams(max_tokens=rng.randint(1, 128))))
    seconds, slices, clock = 0.0, 0, time.perf_counter
    while one.has_work:
        start = clock()
        batch = one.plan(start)
        planned = clock()
        output = answer(batch)
        ran = clock()
        one.commit(batch, output, ran)
        seconds += clock() - ran + planned - start
        slices += len(batch)
    return Lives(cache, running, slices, seconds / slices * 1e6, seconds / requests * 1e6)


def profile(running: int, steps: int) -> dict[str, float]:
    """The share of each function's own time in steady steps, largest first. The profiler makes small functions look
    larger than they are."""
    one, watch = decoding(PagedCache, running, steps), cProfile.Profile()
    for step in range(steps):
        watch.enable()
        batch = one.plan(step)
        watch.disable()
        output = answer(batch)
        watch.enable()
        one.commit(batch, output, step)
        watch.disable()
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

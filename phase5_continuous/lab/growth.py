"""`python -m phase5_continuous.lab growth`: from a static batch to this phase's scheduler, one change at a time.

One set of requests, all there at the start, through four schedulers over the same pool. Simulated: the figures are the
same on every machine.
"""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from rich.console import Console

from phase0_request.batch import Batch
from phase0_request.lab.report import finish, parser, section
from phase1_kv_pool.allocator import OutOfPagesError
from phase1_kv_pool.cache import PagedCache
from phase2_prefill_decode.scheduler import StaticScheduler
from phase3_chunked_prefill.budget import TokenBudget
from phase5_continuous.lab.simulator import WHOLE, Setting, Simulation
from phase5_continuous.lab.traces import EOS, Trace
from phase5_continuous.scheduler import Scheduler

PAGES, MOST = 512, 512  # of the pool, of an answer in tokens
BATCH = 64  # requests at once, if the pool has room
TRACE = Trace(kind="batch", requests=128, prompt=55, max_prompt=512, answer=64, max_answer=MOST)


# region every_step
class EveryStep(StaticScheduler):
    """Admits at every step, with pages for the longest output that a request may have."""

    def plan(self, now: float) -> Batch:
        self.admit(now)
        return self.plan_step([sequence.request for sequence in self.running])


# endregion


# region page_by_page
class PageByPage(EveryStep):
    """Admits a request with pages for the tokens that it has, and appends a page when it needs one."""

    def plan(self, now: float) -> Batch:
        for sequence in self.running:
            self.cache.grow(sequence.request, sequence.request.total)  # OutOfPagesError if the pool is full
        for sequence in self.waiting:
            sequence.longest = sequence.request.total  # what `admit` reserves
        return super().plan(now)


# endregion


def preempting(cache: PagedCache) -> Scheduler:
    """This phase's scheduler. Whole prompts and no shared pages, as the others have it."""
    return Scheduler(cache, [EOS], TokenBudget(WHOLE, WHOLE), max_running=BATCH)


GROWTH: dict[str, Callable[[PagedCache], StaticScheduler | Scheduler]] = {
    "static": lambda cache: StaticScheduler(cache, [EOS], batch_size=BATCH),
    "every_step": lambda cache: EveryStep(cache, [EOS], batch_size=BATCH),
    "page_by_page": lambda cache: PageByPage(cache, [EOS], batch_size=BATCH),
    "preempting": preempting,
}


@dataclass(frozen=True, slots=True)
class Stage:
    """What one of the schedulers did with the requests."""

    ended: int  # requests with a whole answer
    steps: int
    requests_per_step: float
    seconds: float  # simulated
    preemptions: int


class Grown(Simulation):
    """The simulation with one of these schedulers in place of its setting's."""

    def __init__(self, make: Callable[[PagedCache], StaticScheduler | Scheduler]) -> None:
        super().__init__(TRACE.arrivals(), Setting(pages=PAGES, max_tokens=MOST))
        self.scheduler = self.core.scheduler = make(PagedCache(PAGES))


def serve(make: Callable[[PagedCache], StaticScheduler | Scheduler]) -> Stage:
    """Serve the requests to their end, or to the step for which there is no page."""
    simulation, steps = Grown(make), 0
    with suppress(OutOfPagesError):  # it ends the stage, whose steps so far are the figure
        while simulation.going:
            steps += simulation.step() is not None
    outcome = simulation.outcome()
    return Stage(outcome.requests, steps, outcome.mean_batch, simulation.clock.now, outcome.preemptions)


def main(arguments: list[str] | None = None) -> int:
    p = parser("phase5_continuous.lab growth", __doc__)
    options, console = p.parse_args(arguments), Console(highlight=False)
    stages = {name: serve(make) for name, make in GROWTH.items()}
    figures = section(console, f"{TRACE.requests} requests that arrive together", stages)
    finish(p, options, arguments, {"requests": TRACE.requests, "pages": PAGES, "stages": figures})
    return 0

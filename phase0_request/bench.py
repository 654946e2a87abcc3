"""`python -m phase0_request.bench`: what the host pays for a request in a step, with a model that takes no time.

Real steps last milliseconds and hold hundreds of requests, so this has to stay at microseconds a request.
"""

import argparse
import random
import time
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from phase0_request.batcher import Batcher
from phase0_request.machine import record
from phase0_request.params import SamplingParams
from phase0_request.request import Request

EOS = 0
BATCH_SIZES = (1, 16, 64, 256)


@dataclass(frozen=True, slots=True)
class HostCost:
    """Microseconds of host time, per request and step but for submit, which is per request."""

    batch_size: int
    requests: int
    steps: int
    slices: int
    submit_us: float
    plan_us: float
    commit_us: float

    @property
    def per_request_step_us(self) -> float:
        return self.plan_us + self.commit_us


def measure(num_requests: int, batch_size: int, seed: int = 0, progress: Progress | None = None) -> HostCost:
    """Requests through queue and batcher: all there at the start, prompts of 1 to 512 tokens, answers of 1 to 64."""
    rng = random.Random(seed)
    requests = [
        Request(f"r{n}", tuple(range(1, rng.randint(1, 512) + 1)), SamplingParams(max_tokens=rng.randint(1, 64)))
        for n in range(num_requests)
    ]
    batcher = Batcher([EOS], batch_size)
    clock = time.perf_counter
    bar = progress.add_task(f"batch of {batch_size}", total=num_requests) if progress else None
    start = clock()
    for request in requests:
        batcher.submit(request)
    submitting = clock() - start
    planning = committing = 0.0
    steps = slices = 0
    while True:
        start = clock()
        batch = batcher.plan(start)
        planned = clock()
        if not batch:
            break
        tokens = [7] * len(batch)
        ran = clock()
        batcher.commit(batch, tokens, ran)
        committing += clock() - ran
        planning += planned - start
        steps += 1
        slices += len(batch)
        if progress and bar is not None and steps % 64 == 0:
            progress.update(bar, completed=num_requests - len(batcher.waiting) - len(batcher.running))
    if progress and bar is not None:
        progress.update(bar, completed=num_requests)
    unfinished = sum(not request.finished for request in requests)
    if unfinished:
        raise RuntimeError(f"{unfinished} of {num_requests} requests were never finished")
    return HostCost(
        batch_size=batch_size,
        requests=num_requests,
        steps=steps,
        slices=slices,
        submit_us=submitting / num_requests * 1e6,
        plan_us=planning / slices * 1e6,
        commit_us=committing / slices * 1e6,
    )


def main(arguments: list[str] | None = None) -> None:
    p = argparse.ArgumentParser(prog="python -m phase0_request.bench", description=__doc__)
    p.add_argument("-n", "--num-requests", type=int, default=10_000, help="(%(default)s)")
    p.add_argument("--json", type=Path, metavar="FILE", help="write the figures here")
    options = p.parse_args(arguments)
    if options.num_requests < 1:
        p.error(f"--num-requests must be at least 1, got {options.num_requests}")
    console = Console()
    with Progress(console=console, transient=True) as progress:
        costs = [measure(options.num_requests, size, progress=progress) for size in BATCH_SIZES]
    table = Table(title=f"Host time, {options.num_requests:,} requests, \u00b5s", title_justify="left", box=None)
    for name in ("batch", "steps", "submit", "plan", "commit", "per request and step", "per step"):
        table.add_column(name, justify="right")
    for cost in costs:
        both = cost.per_request_step_us
        per_step = both * cost.slices / cost.steps
        figures = (cost.submit_us, cost.plan_us, cost.commit_us, both, per_step)
        table.add_row(str(cost.batch_size), str(cost.steps), *(f"{figure:.2f}" for figure in figures))
    console.print(table)
    if options.json is not None:
        by_batch = {
            f"batch_{c.batch_size}": {
                "submit_us": c.submit_us,
                "plan_us": c.plan_us,
                "commit_us": c.commit_us,
                "per_request_step_us": c.per_request_step_us,
                "steps": c.steps,
            }
            for c in costs
        }
        command = f"python -m phase0_request.bench --num-requests {options.num_requests}"
        record(options.json, command, {"num_requests": options.num_requests, **by_batch})
        console.print(f"Figures written to {options.json}")


if __name__ == "__main__":
    main()

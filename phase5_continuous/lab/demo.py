"""`python -m phase5_continuous`: the batch changes in every step: requests wait, prefill, decode and are preempted.

Scheduler and memory are those of the engine. Step times are what the cost model predicts for an 8B model on one GPU.
"""

import argparse

from rich.console import Console

from phase0_request.lab.report import table
from phase0_request.lab.viewer import Recording
from phase5_continuous.lab.simulator import Setting, Simulation
from phase5_continuous.lab.traces import KINDS, Trace
from phase5_continuous.policies import POLICIES
from phase5_continuous.scheduler import Scheduler


def main(arguments: list[str] | None = None) -> int:
    p = argparse.ArgumentParser(prog="python -m phase5_continuous", description=__doc__)
    p.add_argument("--policy", choices=POLICIES, default="fcfs", help="(%(default)s)")
    p.add_argument("--kind", choices=KINDS, default="poisson", help="of arrivals (%(default)s)")
    p.add_argument("--pages", type=int, default=32, help="in the memory (%(default)s)")
    p.add_argument("--max-running", type=int, default=8, help="requests (%(default)s)")
    options, console = p.parse_args(arguments), Console(highlight=False)
    trace = Trace(kind=options.kind, requests=24, rate=60.0, prompt=40, answer=16, max_prompt=200, max_answer=48)
    setting = Setting(
        way=options.policy, pages=options.pages, max_running=options.max_running, chunk=64, budget=96,
        max_tokens=trace.max_answer,
    )  # fmt: skip
    try:
        simulation = Simulation(trace.arrivals(), setting)
    except ValueError as error:
        p.error(str(error))
    scheduler, recording = simulation.scheduler, Recording()
    assert isinstance(scheduler, Scheduler)
    while simulation.going:
        step = simulation.step()
        if step is not None and step.batch:
            recording.add(step, [sequence.request for sequence in scheduler.sequences])
    recording.show(
        console,
        f"{trace.requests} requests, {options.pages} pages, at most {options.max_running} running",
        bar="tokens",
    )
    o = simulation.outcome()
    names = ("requests", "steps", "seconds", "tokens/s", "TTFT p50 ms", "p99 ms", "preempted", "refused")
    times = 1e3 * o.ttft_p50, 1e3 * o.ttft_p99
    row = (o.requests, o.steps, o.seconds, o.tokens_per_second, *times, o.preemptions, o.refused)
    console.print("", table(names, [row]), sep="\n")
    return 0

"""The contest on a real engine: the same traces, smaller and slower, a model of 17 million parameters, a real clock."""

import time
from collections.abc import Sequence

from rich.console import Console

from phase0_request.metrics import percentile
from phase0_request.params import SamplingParams
from phase0_request.request import Request
from phase2_prefill_decode.lab.shapes import SHAPES
from phase2_prefill_decode.loading.model import Model, default_device
from phase3_chunked_prefill.budget import TokenBudget
from phase3_chunked_prefill.kernels.attention import ATTEND
from phase5_continuous.engine import continuous
from phase5_continuous.invariants import check
from phase5_continuous.lab.contest import TRACES, CheckedPolicy, Entry, Run, hit_rate
from phase5_continuous.lab.report import side_by_side
from phase5_continuous.lab.traces import Arrival
from phase5_continuous.scheduler import Scheduler

REQUESTS, RATE = 0.15, 0.15  # of the simulated traces
PAGES, PAGE_SIZE, MAX_RUNNING = 512, 16, 24
BUDGET = TokenBudget(128, 256)
SHORTER = 4  # prompts and answers are so many times shorter


def arrivals(trace: str) -> list[Arrival]:
    """A trace as it is served here. The first tokens of a prompt tell it from others, so prompts are cut at the end."""
    make, requests, rate = TRACES[trace]
    come = make(round(REQUESTS * requests), RATE * rate)
    return [
        one._replace(prompt=one.prompt[: max(len(one.prompt) // SHORTER, 1)], answer=max(one.answer // SHORTER, 1))
        for one in come
    ]


def serve(entry: Entry, model: Model, come: Sequence[Arrival]) -> tuple[Run, float]:
    """Serve a trace in real time. Returns also the hit rate of the cache."""
    cache, vocabulary, run = entry.cache(PAGES, PAGE_SIZE), model.config.vocab_size, Run()
    loop = continuous(model, BUDGET, cache=cache, policy=CheckedPolicy(entry.policy()), max_running=MAX_RUNNING).core
    assert isinstance(loop.scheduler, Scheduler)
    loop.scheduler.admission.share = entry.share()
    start, coming = loop.clock(), list(enumerate(come))[::-1]
    while coming or loop.has_work:
        while coming and start + coming[-1][1].time <= loop.clock():
            number, one = coming.pop()
            params = SamplingParams(temperature=0, max_tokens=one.answer, ignore_eos=True)
            prompt = tuple(token % vocabulary for token in one.prompt)
            tenant = one.tenant if entry.tenants else ""
            loop.submit(Request(f"r{number}", prompt, params, one.priority, start + one.time, tenant=tenant))
        step = loop.step()
        if step is None and coming:
            time.sleep(max(start + coming[-1][1].time - loop.clock(), 0))
        for event in step.events if step else ():
            if event.finish_reason is not None:
                run.end(event.request)
    check(loop.scheduler)
    return run, hit_rate(cache)


def compare(console: Console, entries: Sequence[Entry]) -> None:
    """Run each trace with each entry, one after the other, and print a table for each trace."""
    device = default_device()
    model = Model.random(SHAPES["17m"], device=device, attend=ATTEND.on(device))
    serve(entries[0], model, arrivals("bursty")[:8])  # warm-up
    for trace in TRACES:
        rows = {}
        for entry in entries:
            run, hits = serve(entry, model, arrivals(trace))
            times = [1e3 * percentile(found, q) for found in (run.ttft, run.itl) for q in (50, 99)]
            rows[entry.name] = [f"{run.attainment:.0%}", *(f"{ms:,.0f} ms" for ms in times), f"{hits:.0%}"]
        console.print(f"On this machine, {trace}: {run.ended} requests")
        console.print(side_by_side("", ("met\nSLO", "TTFT\np50", "\np99", "ITL\np50", "\np99", "hit\nrate"), rows))

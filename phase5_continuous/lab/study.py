"""`python -m phase5_continuous.lab study --json FILE`: continuous batching beside static, measured on this machine.

One set of requests with long-tail lengths, served by phase 2's engine and by this one: the same model, the same pool.
The length of an answer is not known beforehand: it ends when a stop token is sampled. Then, how long the simulator
takes for a million requests.
"""

import random
import subprocess
import sys
import time
from statistics import mean
from typing import Any

import torch
from rich.console import Console

from phase0_request.lab.metrics import summarize
from phase0_request.lab.report import finish, parser, section
from phase0_request.params import SamplingParams
from phase0_request.support import entry
from phase1_kv_pool.cache import PagedCache
from phase2_prefill_decode.engine import static
from phase2_prefill_decode.lab.shapes import SHAPES
from phase2_prefill_decode.model import Model, default_device
from phase3_chunked_prefill.budget import TokenBudget
from phase5_continuous.engine import continuous

PAGES, PAGE_SIZE = 512, 16
MOST = 512  # output tokens of a request
BATCH = 64  # requests at once, if the pool has room
BUDGET = TokenBudget(256, 512)
FIGURES = ("tokens_per_second", "ttft_p50_ms", "ttft_p99_ms", "seconds")
LAUNCH = """
import resource, subprocess, sys
subprocess.run(sys.argv[1:], check=True, stdout=subprocess.DEVNULL)
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
"""


def model_of(shape: str) -> Model:
    device = default_device()
    return Model.random(SHAPES[shape], device=device)


def workload(vocabulary: int, count: int, seed: int = 0) -> tuple[list[list[int]], list[SamplingParams]]:
    """Prompts of log-normal length, and answers that end when a stop token is sampled.

    At the highest temperature all tokens are about equally likely. So an answer with n stop tokens has vocabulary / n
    tokens on average; n is chosen for averages that are log-normal, 64 at the least.
    """
    rng, tokens = random.Random(seed), range(8, vocabulary)
    prompts, params = [], []
    for number in range(count):
        length = min(max(round(rng.lognormvariate(4.0, 0.8)), 8), 512)
        average = max(rng.lognormvariate(4.0, 1.0), vocabulary / 128)
        stops = rng.sample(tokens, max(round(vocabulary / average), 1))
        prompts.append(rng.choices(tokens, k=length))
        params.append(
            SamplingParams(temperature=100, max_tokens=MOST, stop_token_ids=stops, seed=number, ignore_eos=True)
        )
    return prompts, params


def serve(model: Model, way: str, count: int) -> dict[str, float]:
    """Serve the workload with a new engine of either kind. All requests arrive at the start."""
    prompts, params = workload(model.config.vocab_size, count)
    cache, preemptions = PagedCache(PAGES, PAGE_SIZE), 0
    if way == "static":
        answers = static(model, cache=cache, batch_size=BATCH).generate(prompts, params)
    else:
        engine = continuous(model, BUDGET, cache=cache, max_running=BATCH)
        answers = engine.generate(prompts, params)
        preemptions = engine.core.scheduler.running_set.num_preemptions
    figures = summarize([answer.request for answer in answers]).figures()
    lengths = [len(answer.output_tokens) for answer in answers]
    return {name: figures[name] for name in FIGURES} | {"mean_tokens": mean(lengths), "preemptions": preemptions}


def beside(model: Model, count: int, runs: int) -> dict[str, Any]:
    """Run both engines in turns, and take the fastest run of each."""
    ways = ("static", "continuous")
    for way in ways:
        serve(model, way, 4)  # warm-up
    rounds = [{way: serve(model, way, count) for way in ways} for _ in range(runs)]
    best = {way: min((each[way] for each in rounds), key=lambda run: run["seconds"]) for way in ways}
    static, continuous = best["static"], best["continuous"]
    return best | {
        "throughput_ratio": continuous["tokens_per_second"] / static["tokens_per_second"],
        "ttft_p99_ratio": static["ttft_p99_ms"] / continuous["ttft_p99_ms"],
    }


def many(requests: int) -> dict[str, float]:
    """Simulate this many requests in a process of their own, and measure its time and peak memory.

    A child's peak counts the memory of its parent at the fork. So the simulation is not started from this process,
    which holds torch and a model, but from one that holds next to nothing.
    """
    simulator = [sys.executable, "-m", "phase5_continuous.lab", "simulator", "--ways", "fcfs", "--rate", "150"]
    launch = [sys.executable, "-c", LAUNCH, *simulator, "-n", str(requests)]
    start = time.perf_counter()
    peak = int(subprocess.run(launch, check=True, stdout=subprocess.PIPE, env=entry.environment()).stdout)  # in KiB
    seconds = time.perf_counter() - start
    return {"requests": requests, "seconds": seconds, "minutes": seconds / 60, "peak_mib": peak / 1024}


def main(arguments: list[str] | None = None) -> int:
    p = parser("phase5_continuous.lab study", __doc__)
    p.add_argument("--shape", choices=SHAPES, default="17m", help="(%(default)s)")
    p.add_argument("-n", "--requests", type=int, default=128, help="measured (%(default)s)")
    p.add_argument("--runs", type=int, default=3, help="of which the best counts (%(default)s)")
    p.add_argument("--threads", type=int, help="of torch, while it is measured (torch's choice)")
    p.add_argument("--many", type=int, default=1_000_000, help="requests simulated in one go; 0: none (%(default)s)")
    options, console = p.parse_args(arguments), Console(highlight=False)
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    measured = beside(model_of(options.shape), options.requests, options.runs)
    section(console, "", {way: measured[way] for way in ("static", "continuous")})
    console.print(
        f"{measured['throughput_ratio']:.1f} times the tokens a second, p99 TTFT {measured['ttft_p99_ratio']:.1f} "
        "times as early"
    )
    figures: dict[str, Any] = {"measured": measured}
    if options.many:
        figures["many"] = simulated = many(options.many)
        took = f"{simulated['minutes']:.1f} minutes, {simulated['peak_mib']:.0f} MiB"
        console.print(f"\n{options.many:,} requests simulated in {took}")
    finish(p, options, arguments, figures, gpu=default_device().type == "cuda")
    return 0

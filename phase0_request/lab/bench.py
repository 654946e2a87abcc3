"""`python -m phase0_request.lab bench`: host time for each request in a step, and throughput against batch size.

Host time is measured with a model that takes no time: real steps last milliseconds and hold hundreds of requests, so
the host has microseconds for each. Throughput is computed in virtual time from the cost model of the mock.
"""

import random
from dataclasses import dataclass
from functools import partial

from rich.console import Console
from rich.progress import track

from phase0_request.batch import Batch, StepOutput
from phase0_request.core import EngineCore
from phase0_request.lab.batcher import Batcher
from phase0_request.lab.metrics import percentile
from phase0_request.lab.mock_model import MockModel, StepCost
from phase0_request.lab.report import finish, parser, section
from phase0_request.lab.simulate import Finished, simulate
from phase0_request.params import SamplingParams
from phase0_request.request import Request

EOS = 0
HOST_BATCH_SIZES = (1, 16, 64, 256)
BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64, 128)
BATCHING_REQUESTS = 512


@dataclass(frozen=True, slots=True)
class HostCost:
    """Microseconds of host time: `submit_us` for each request, the others for each request in a step."""

    batch_size: int
    steps: int
    submit_us: float
    plan_us: float
    commit_us: float
    per_request_step_us: float


@dataclass(frozen=True, slots=True)
class Batching:
    """Throughput and latency of one batch size, with all requests arriving at the start."""

    batch_size: int
    tokens_per_second: float
    itl_p50_ms: float
    itl_p99_ms: float
    ttft_p50_ms: float


def workload(count: int, longest_prompt: int, longest_answer: int, seed: int = 0) -> list[Request]:
    """Requests of random lengths, deterministic for a seed."""
    rng = random.Random(seed)
    return [
        Request(
            f"r{n}",
            tuple(range(1, rng.randint(1, longest_prompt) + 1)),
            SamplingParams(max_tokens=rng.randint(1, longest_answer), ignore_eos=True),
        )
        for n in range(count)
    ]


class InstantRunner:
    """A runner that takes no time: every slice yields the same token."""

    def pack(self, batch: Batch) -> StepOutput:
        return StepOutput([7] * len(batch))

    def launch(self, output: StepOutput) -> Finished:
        return Finished(output)


def host_cost(num_requests: int, batch_size: int) -> HostCost:
    """Time queue and batcher with prompts of up to 512 tokens and answers of up to 64. The model takes no time."""
    requests = workload(num_requests, longest_prompt=512, longest_answer=64)
    core = EngineCore(Batcher([EOS], batch_size), InstantRunner())
    start = core.clock()
    for request in requests:
        core.submit(request)
    submitting = core.clock() - start
    planning = committing = 0.0
    slices = 0
    for step in core.run():
        planning += step.plan
        committing += step.commit
        slices += len(step.batch)
    unfinished = sum(not request.finished for request in requests)
    if unfinished:
        raise RuntimeError(f"{unfinished} of {num_requests} requests were never finished")
    plan_us, commit_us = planning / slices * 1e6, committing / slices * 1e6
    return HostCost(batch_size, core.steps, submitting / num_requests * 1e6, plan_us, commit_us, plan_us + commit_us)


def batching(batch_size: int, num_requests: int = BATCHING_REQUESTS, cost: StepCost | None = None) -> Batching:
    """Simulate prompts and answers of up to 200 tokens in virtual time, at the costs of the mock model."""
    model = MockModel({(1,): [7]}, EOS, cost or StepCost())
    requests = workload(num_requests, longest_prompt=200, longest_answer=200)
    summary = simulate(requests, model, [EOS], batch_size)
    p50, p99 = (percentile(summary.itl, q) * 1000 for q in (50, 99))
    return Batching(batch_size, summary.tokens_per_second, p50, p99, percentile(summary.ttft, 50) * 1000)


def main(arguments: list[str] | None = None) -> int:
    p = parser("phase0_request.lab bench", __doc__)
    p.add_argument("-n", "--num-requests", type=int, default=10_000, help="for the host's cost (%(default)s)")
    options, console = p.parse_args(arguments), Console(highlight=False)
    if options.num_requests < 1:
        p.error(f"--num-requests must be at least 1, got {options.num_requests}")
    watch = partial(track, console=console, transient=True)
    hosts = [host_cost(options.num_requests, size) for size in watch(HOST_BATCH_SIZES, "host cost")]
    batches = [batching(size) for size in watch(BATCH_SIZES, "batch sizes")]
    title = f"Host time for {options.num_requests:,} requests, \u00b5s a request; plan and commit: and a step"
    figures = {
        "num_requests": options.num_requests,
        "host": section(console, title, {f"batch_{h.batch_size}": h for h in hosts}, digits=2),
        "batching": section(
            console,
            f"{BATCHING_REQUESTS} requests at once on the mock, virtual time",
            {f"batch_{b.batch_size}": b for b in batches},
        ),
    }
    finish(p, options, arguments, figures)
    return 0

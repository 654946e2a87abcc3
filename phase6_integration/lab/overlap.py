"""`python -m phase6_integration.lab overlap`: how long a GPU waits for the host, with and without one step ahead.

Scheduler, cache, packing and sampling parameters are the engine's, and take the time that they take here. Only the
device is not real: each step occupies it for as long as the cost model predicts for an 8B model on an H200, with
perfect kernels at the datasheet's bandwidth, while the host goes on. So no GPU is needed to see whether the host keeps
one busy. A launch takes the host no time here: under CUDA graphs it is one call a step.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from types import SimpleNamespace
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor

from phase0_request.batch import Batch, StepOutput
from phase0_request.core import EngineCore, Launched, Step
from phase0_request.lab.report import finish, parser, section
from phase0_request.params import SamplingParams
from phase0_request.request import Request
from phase1_kv_pool.cache import PagedCache
from phase1_kv_pool.layer import KVLayer
from phase1_kv_pool.layout import KVLayout
from phase1_kv_pool.pool import KVPool
from phase2_prefill_decode.backend import TORCH
from phase2_prefill_decode.decoder import StepTensors
from phase2_prefill_decode.lab.cost import CostModel
from phase2_prefill_decode.lab.roofline import named
from phase2_prefill_decode.sampling.sampler import Sampler
from phase2_prefill_decode.step.device_state import DeviceState
from phase2_prefill_decode.step.graphs import Replay
from phase2_prefill_decode.step.packed import PackedStep
from phase2_prefill_decode.step.runner import ModelRunner
from phase3_chunked_prefill.budget import TokenBudget
from phase5_continuous.lab.simulator import MODELS
from phase5_continuous.lab.virtual import StepTimes
from phase5_continuous.scheduler import Scheduler
from phase6_integration.engine.gc_freeze import freeze

BATCHES = (64, 256)
CONTEXT = 1024  # tokens of each request before the first measured step
BUDGET = 8192  # tokens of a step
STEPS = 200
SHOWN = 4  # steps in the timeline
MODEL, GPU = "8b", "H200"
VOCABULARY = 8  # of the logits, which are all 0
LAYOUT = KVLayout(layers=1, kv_heads=1, head_dim=8)  # the pool is never read

Interval = tuple[float, float]


class HostClock:
    """The host's time, without what the lab itself spends on prediction."""

    def __init__(self) -> None:
        self._stopped = 0.0

    def __call__(self) -> float:
        return time.perf_counter() - self._stopped

    def wait(self, until: float) -> None:
        """Sleep, and for the last part look at the clock: a sleep may end late."""
        if (left := until - self()) > 1e-3:
            time.sleep(left - 1e-3)
        while self() < until:
            pass

    @contextmanager
    def stopped(self) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self._stopped += time.perf_counter() - start


@dataclass(slots=True)
class FakeDevice:
    """Runs steps one after the other, in the order of their launch, while the host goes on."""

    clock: Callable[[], float]
    wait: Callable[[float], None]  # until a time of the clock
    steps: list[Interval] = field(default_factory=list)
    waits: list[Interval] = field(default_factory=list)  # of the host, for a step to end

    def launch(self, seconds: float) -> float:
        """Queue a step. Returns when it will have ended."""
        start = max(self.clock(), self.steps[-1][1] if self.steps else 0.0)
        self.steps.append((start, start + seconds))
        return start + seconds

    def join(self, end: float) -> None:
        """Wait for the end of a step."""
        start = self.clock()
        if start < end:
            self.wait(end)
            self.waits.append((start, self.clock()))

    @property
    def idle_share(self) -> float:
        """The share of the time from the first step to the last in which none ran."""
        idle = sum(after[0] - before[1] for before, after in pairwise(self.steps))
        return idle / (self.steps[-1][1] - self.steps[0][0])


class NoDecoder:
    """A decoder that computes nothing: all logits are 0."""

    config = SimpleNamespace(vocab_size=VOCABULARY)
    dtype = torch.float32
    backend = TORCH

    def rope(self, positions: int) -> None:
        """It has no tables."""

    def __call__(
        self, step: StepTensors, layers: Sequence[KVLayer], out: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        logits = torch.zeros(len(step.newest_rows), VOCABULARY) if out is None else out.zero_()
        return logits, logits[:0]


@dataclass(slots=True)
class Landing:
    """A step; its output is there once the fake device has run it."""

    step: Launched
    device: FakeDevice
    end: float

    def output(self) -> StepOutput:
        self.device.join(self.end)
        return self.step.output()


class FakeDeviceRunner(ModelRunner):
    """Packs and launches as the ModelRunner does, with a recorded step of `size` decodes that takes the host no time to
    replay. `seconds` predicts how long the device takes for a batch."""

    def __init__(
        self, cache: PagedCache, device: FakeDevice, seconds: Callable[[Batch], float], size: int, ahead: int
    ) -> None:
        decoder: Any = NoDecoder()
        pool = KVPool(LAYOUT, cache.max_tokens // cache.page_size, "cpu", torch.float32)
        state = DeviceState(pool.device, 2 * size, pool.num_pages // size)
        super().__init__(decoder, pool, cache, Sampler(VOCABULARY, 0), state, ahead=ahead > 0)
        self.record([size], cache.max_tokens // size, recorded)
        self.device = device
        self.seconds = seconds
        self.replays = 0
        self._seconds = 0.0

    def pack(self, batch: Batch) -> PackedStep:
        self._seconds = self.seconds(batch)
        return super().pack(batch)

    def launch(self, step: PackedStep) -> Any:
        self.replays += step.graph_size > 0
        return Landing(super().launch(step), self.device, self.device.launch(self._seconds))


def recorded(run: Replay) -> Replay:
    """Run a step once. Replaying it returns the same result."""
    result = run()
    return lambda: result


def predicted(clock: HostClock) -> Callable[[Batch], float]:
    """The seconds of a step by the cost model, in no time of the clock."""
    times = StepTimes(CostModel(MODELS[MODEL]), named(GPU))

    def seconds(batch: Batch) -> float:
        with clock.stopped():
            return times.seconds(times.load([piece[1:3] for piece in batch.slices], len(batch)))

    return seconds


def nothing(batch: Batch) -> float:
    return 0.0


# region play
def play(
    running: int,
    ahead: int,
    device: FakeDevice,
    seconds: Callable[[Batch], float],
    *,
    context: int = CONTEXT,
    steps: int = STEPS,
) -> list[Step]:
    """Prefill requests on a device that takes no time, then decode all of them. Returns the steps of the decodes; what
    the device did in them is in `device`."""
    answer = steps + running * context // (BUDGET // 2) + 8  # so that none ends: the first decode while others prefill
    cache = PagedCache(running * -(-(context + answer) // 16), 16)
    scheduler = Scheduler(cache, (), TokenBudget(BUDGET, BUDGET), max_running=running, watermark=0, ahead=ahead)
    runner = FakeDeviceRunner(cache, device, nothing, running, ahead)
    core = EngineCore(scheduler, runner, device.clock)
    params = SamplingParams(temperature=0, max_tokens=answer, ignore_eos=True)
    for number in range(running):
        core.submit(Request(f"{number}", (1,) * (context - number % 16), params))  # not all need a page in one step
    while (step := core.step()) is None or step.decode_tokens < running:
        pass
    runner.seconds = seconds
    device.steps.clear()
    device.waits.clear()
    before = runner.replays
    done = [step for step in (core.step() for _ in range(steps)) if step is not None]
    if runner.replays - before != len(device.steps):
        raise RuntimeError("a decode step was launched kernel by kernel")
    return done


# endregion


def measure(running: int, ahead: int, steps: int) -> dict[str, Any]:
    """The figures of one batch size, and the lanes of a few steps in its middle."""
    clock = HostClock()
    device = FakeDevice(clock, clock.wait)
    play(running, ahead, device, predicted(clock), steps=steps)
    ran = device.steps
    wall = (ran[-1][1] - ran[0][0]) / len(ran)
    return {
        "idle_share": device.idle_share,
        "step_ms": wall * 1e3,
        "device_ms": sum(end - start for start, end in ran) / len(ran) * 1e3,
        "timeline": timeline(device, len(ran) // 2),
    }


def host_milliseconds(running: int, steps: int) -> dict[str, float]:
    """The host's time of a step by part, medians, with a device that takes no time."""
    clock = HostClock()
    done = play(running, 0, FakeDevice(clock, clock.wait), nothing, steps=steps)
    parts = {name: median(getattr(step, name) for step in done) * 1e3 for name in ("plan", "pack", "run", "commit")}
    return {**parts, "sum": median(step.plan + step.pack + step.run + step.commit for step in done) * 1e3}


def timeline(device: FakeDevice, first: int) -> dict[str, list[list[float]]]:
    """Milliseconds in which the host works and in which the device does, for a few steps from `first` on."""
    shown = device.steps[first : first + SHOWN]
    start, stop = shown[0][0], shown[-1][1]
    waits = [(a, b) for a, b in device.waits if b > start and a < stop]
    free = [start, *(max(moment, start) for wait in waits for moment in wait), stop]
    host = [(a, b) for a, b in zip(free[::2], free[1::2], strict=True) if a < b]
    return {
        name: [[round(1e3 * (moment - start), 4) for moment in pair] for pair in lane]
        for name, lane in (("host", host), ("device", shown))
    }


def main(arguments: list[str] | None = None) -> int:
    p = parser("phase6_integration.lab overlap", __doc__)
    p.add_argument("--batches", type=int, nargs="+", default=list(BATCHES), help="requests that run (64 256)")
    p.add_argument("--steps", type=int, default=STEPS, help="to measure (%(default)s)")
    options = p.parse_args(arguments)
    torch.set_num_threads(1)  # the host launches from one thread
    freeze()  # as the engine's process does
    console = Console()
    cases = [(running, ahead) for running in options.batches for ahead in (0, 1)]
    figures: dict[str, Any] = {"model": MODEL, "gpu": GPU, "context": CONTEXT}
    for running, ahead in track(cases, "steps", console=console, transient=True):
        figures[f"batch_{running}_ahead_{ahead}"] = measure(running, ahead, options.steps)
    largest = max(options.batches)
    rows = {name: row for name, row in figures.items() if name.startswith("batch")}
    section(console, "Decodes, with and without a step ahead", rows, 2, ("step_ms", "device_ms", "idle_share"))
    figures[f"host_ms_{largest}"] = host = host_milliseconds(largest, options.steps)
    section(console, "The host's ms of a step, without a device", {f"{largest} running": host}, digits=2)
    finish(p, options, arguments, figures)
    return 0

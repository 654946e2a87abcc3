"""`python -m phase2_prefill_decode.lab phases`: the cost of prefill and of decode, measured and predicted.

Prefill against the length of the prompt; decode against the batch and against the context. Of each step: the time, the
operations and bytes that the cost model counts, and so the speeds at which the machine did them.
"""

import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from rich.console import Console
from rich.progress import track

from phase0_request.batch import Batch, Slice
from phase0_request.lab.report import finish, parser, table
from phase0_request.params import SamplingParams
from phase0_request.request import Request
from phase1_kv_pool.cache import PagedCache
from phase1_kv_pool.pool import KVPool
from phase2_prefill_decode.lab import ceilings
from phase2_prefill_decode.lab.cost import CostModel
from phase2_prefill_decode.lab.roofline import Device, measured, predict
from phase2_prefill_decode.lab.shapes import SHAPES
from phase2_prefill_decode.model import Model, default_device, sampler_for
from phase2_prefill_decode.step.runner import ModelRunner

PROMPTS = (1, 4, 16, 64, 128, 256, 512, 1024, 2048)
BATCHES = (1, 2, 4, 8, 16, 32, 64)
CONTEXTS = (64, 256, 1024, 2048, 4096)
CONTEXT = 256  # while the batch varies
BATCH = 8  # while the context varies
SECONDS = 0.25  # a point: the best of all steps that fit


@dataclass(frozen=True, slots=True)
class Point:
    """One measured step. A decode has one new token per sequence; a prefill has all tokens of one sequence."""

    phase: str
    batch: int
    tokens: int  # that a sequence computes
    context: int  # all tokens of a sequence
    seconds: float
    operations: int
    bytes: int
    predicted: float  # seconds

    @property
    def gflops(self) -> float:
        return self.operations / self.seconds / 1e9

    @property
    def gb_per_second(self) -> float:
        return self.bytes / self.seconds / 1e9

    @property
    def intensity(self) -> float:
        return self.operations / self.bytes

    @property
    def token_seconds(self) -> float:
        """The time of the step per computed token."""
        return self.seconds / (self.batch * self.tokens)

    def figures(self) -> dict[str, Any]:
        """The figures for the result file."""
        return {
            **asdict(self),
            "ms": self.seconds * 1e3,
            "predicted_ms": self.predicted * 1e3,
            "token_us": self.token_seconds * 1e6,
            "gflops": self.gflops,
            "gb_per_second": self.gb_per_second,
            "intensity": self.intensity,
        }


class Steps:
    """A model with a pool, to time single steps. Nothing is committed."""

    def __init__(self, model: Model, num_pages: int = 2304, page_size: int = 16) -> None:
        decoder = model.decoder
        self.model = model
        self.cache = PagedCache(num_pages, page_size)
        pool = KVPool(model.config.kv_layout(page_size), num_pages, decoder.device, decoder.dtype)
        self.runner = ModelRunner(decoder, pool, self.cache, sampler_for(model, 0))

    def batch(self, batch: int, tokens: int, context: int) -> Batch:
        """New sequences of `context` tokens, the last `tokens` of which are to be computed."""
        requests = [self._request(number, context, context - tokens) for number in range(batch)]
        return Batch(tuple(Slice(request, context - tokens, tokens) for request in requests))

    def times(self, step: Batch, seconds: float) -> list[float]:
        """The times of a step from packing to the sampled tokens, of as many runs as these seconds allow. Its sequences
        lose their pages."""
        self.runner.run(self.runner.pack(step))
        end, times = time.perf_counter() + seconds, list[float]()
        while not times or time.perf_counter() < end:
            start = time.perf_counter()
            self.runner.run(self.runner.pack(step))
            times.append(time.perf_counter() - start)
        for one in step.slices:
            self.cache.release(one.request)
        return times

    def _request(self, number: int, total: int, computed: int) -> Request:
        vocabulary = self.model.config.vocab_size
        tokens = tuple((number * 7919 + i * 31) % vocabulary for i in range(total))
        request = Request(f"lab-{number}", tokens, SamplingParams(temperature=0))
        request.admit(0.0)
        self.cache.attach(request)
        self.cache.grow(request, total)
        if computed:
            request.advance(0, computed)
        return request


class Laboratory(Steps):
    """Steps beside what the cost model predicts."""

    def __init__(self, model: Model, device: Device, num_pages: int = 2304, page_size: int = 16) -> None:
        super().__init__(model, num_pages, page_size)
        self.device = device
        self.cost = CostModel(model.config, dtype=str(model.decoder.dtype).removeprefix("torch."))

    def prefill(self, prompt: int) -> Point:
        return self.step("prefill", 1, prompt, prompt)

    def decode(self, batch: int, context: int) -> Point:
        """`context` counts the token that is computed."""
        return self.step("decode", batch, 1, context)

    def step(self, phase: str, batch: int, tokens: int, context: int) -> Point:
        """The best time of a step."""
        step = self.batch(batch, tokens, context)
        cost, best = self.cost.step(step), min(self.times(step, SECONDS))
        return Point(
            phase, batch, tokens, context, best, cost.operations, cost.bytes, predict(cost, self.device).seconds
        )


def points(laboratory: Laboratory) -> Iterator[Point]:
    """The three series: prompts, batches, contexts."""
    longest = laboratory.model.config.max_position_embeddings
    plan: Iterable[tuple[str, int, int]] = [
        *(("prefill", 1, prompt) for prompt in PROMPTS if prompt <= longest),
        *(("decode", batch, CONTEXT) for batch in BATCHES),
        *(("decode", BATCH, context) for context in CONTEXTS if context <= longest),
    ]
    for phase, batch, context in track(list(plan), "steps", transient=True):
        yield laboratory.prefill(context) if phase == "prefill" else laboratory.decode(batch, context)


def laboratory(shape: str, device: torch.device, figures: dict[str, Any]) -> Laboratory:
    """A random model of one of SHAPES; `figures` are this machine's ceilings."""
    model = Model.random(SHAPES[shape], device=device)
    result = {"device": device.type, "figures": figures}
    return Laboratory(model, measured(result, model.config.dtype, CostModel(model.config).calls))


def main(arguments: list[str] | None = None) -> int:
    p = parser("phase2_prefill_decode.lab phases", __doc__)
    p.add_argument("--shape", choices=SHAPES, default="17m", help="(%(default)s)")
    options, console, device = p.parse_args(arguments), Console(), default_device()
    with console.status("ceilings of this machine"):
        best = ceilings.measure(device)
    lab = laboratory(options.shape, device, best)
    series = list(points(lab))
    names = ("phase", "batch", "new", "context", "ms", "predicted", "us/token", "GFLOP/s", "GB/s", "FLOP/B")
    columns = ("ms", "predicted_ms", "token_us", "gflops", "gb_per_second", "intensity")
    rows = [(q.phase, q.batch, q.tokens, q.context, *(q.figures()[name] for name in columns)) for q in series]
    console.print(table(names, rows))
    figures = {
        "ceilings": best["best"],
        "read_spread_gb_per_second": best["read_spread_gb_per_second"],
        "ridge": lab.device.ridge,
        "points": {f"{q.phase}_{q.batch}_{q.context}": q.figures() for q in series},
    }
    finish(p, options, arguments, figures, gpu=device.type == "cuda")
    return 0

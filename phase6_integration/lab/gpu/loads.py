"""An engine under load: what decode steps, mixed steps and whole runs of requests take, and what the host does in them.

The engines are those that ship: the options' own token budget, page size and prefix cache. No prompt is used twice, so
the prefix cache finds nothing and costs what it costs.
"""

import gc
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import chain, islice, repeat
from math import ceil
from random import Random
from statistics import fmean, median
from typing import Any, Generic, TypeVar

import torch

from phase0_request.batch import Batch
from phase0_request.core import Launched, Runner, Step
from phase0_request.params import SamplingParams
from phase2_prefill_decode.extras.quantized.quantize import quantize
from phase2_prefill_decode.lab.cost import CostModel
from phase2_prefill_decode.lab.roofline import Device, predict
from phase2_prefill_decode.loading.config import ModelConfig
from phase2_prefill_decode.loading.weights import LayerWeights, Weights, random_weights
from phase6_integration.engine.engine import NanoServingEngine
from phase6_integration.engine.stats import Gauges
from phase6_integration.lab.gpu.rows import Day, Row

WAYS: dict[str, dict[str, Any]] = {  # the one that ships first
    "ahead": {"async_scheduling": True},  # graphs, and one step ahead
    "graphs": {"async_scheduling": False},
    "eager": {"async_scheduling": False, "enforce_eager": True},
    "pieces": {"async_scheduling": True, "enable_piecewise_cuda_graph": True},
}
DRY = {"kv_cache_pages": 64, "max_num_seqs": 4, "max_num_batched_tokens": 32, "threads": 1}
AHEAD = 3  # steps until a change of the load has gone through those in flight
P = TypeVar("P")
Asked = tuple[list[int], SamplingParams]  # a request


def random_prompts(config: ModelConfig, requests: int, tokens: int, seed: int = 0) -> list[list[int]]:
    draw = torch.Generator().manual_seed(seed)
    prompts: list[list[int]] = torch.randint(3, config.vocab_size, (requests, tokens), generator=draw).tolist()
    return prompts


class TimedRunner(Generic[P]):
    """Passes steps on to a runner, and notes the host seconds of each launch."""

    def __init__(self, runner: Runner[P]) -> None:
        self.runner = runner
        self.launches: list[float] = []

    def pack(self, batch: Batch) -> P:
        return self.runner.pack(batch)

    def launch(self, step: P) -> Launched:
        start = time.perf_counter()
        launched = self.runner.launch(step)
        self.launches.append(time.perf_counter() - start)
        return launched


@dataclass(slots=True)
class GPULoad:
    """An engine, and the requests that it is given."""

    engine: NanoServingEngine
    ready_seconds: float
    runner: TimedRunner[Any] = field(init=False)
    submitted: int = 0

    def __post_init__(self) -> None:
        core = self.engine.parts.core
        core.runner = self.runner = TimedRunner(core.runner)

    @property
    def gauges(self) -> Gauges:
        return Gauges.read(self.engine.parts.scheduler)

    def fit(self, requests: int, tokens: int) -> int:
        """As many of these requests as the pool holds when each has all its tokens, so that none is preempted."""
        pages = self.gauges.pages_total // ceil((tokens + 1) / self.engine.parts.scheduler.cache.page_size)
        if not pages:
            raise RuntimeError(f"the pool does not hold a request of {tokens} tokens")
        return min(requests, pages)

    def requests(self, count: int, prompt: int, answer: int, least: int | None = None, **params: Any) -> list[Asked]:
        """Random prompts, each with the parameters of an answer of this length. With `least`, prompts and answers are
        from this many tokens up to these, uniformly at random."""
        draw = Random(self.submitted)
        prompts = random_prompts(self.engine.parts.model.config, count, prompt, self.submitted)
        self.submitted += count
        plain = {"ignore_eos": True, "temperature": 0, **params}
        lengths = [[draw.randint(least or most, most) for most in (prompt, answer)] for _ in prompts]
        return [
            (tokens[:length], SamplingParams(max_tokens=tokens_out, **plain))
            for tokens, (length, tokens_out) in zip(prompts, lengths, strict=True)
        ]

    def submit(self, count: int, prompt: int, answer: int, **params: Any) -> None:
        """Queue requests of random tokens, each with an answer of this length."""
        for asked in self.requests(count, prompt, answer, **params):
            self.engine.add_request(*asked)

    def run(self, steps: int | None = None, behind: Iterable[Asked] = ()) -> list[Step]:
        """Run this many steps, or until no request is left. Each request that ends is followed by one of `behind`."""
        ran: list[Step] = []
        waiting = iter(behind)
        while self.engine.has_work and len(ran) != steps:
            step = self.engine.step()
            if step is not None and step.batch:
                ran.append(step)
                ended = sum(event.finish_reason is not None for event in step.events)
                for asked in islice(waiting, ended):
                    self.engine.add_request(*asked)
        return ran

    def clear(self) -> None:
        """Abort what an earlier measurement has left."""
        for sequence in list(self.engine.parts.scheduler.sequences):
            self.engine.abort(sequence.request)
        self.run()

    def settle(self, decodes: int, context: int, steps: int, chunks: bool) -> int:
        """Bring the engine to where requests decode, and will for this many steps; with `chunks`, beside prompts that
        fill the token budget. Returns the number of requests that decode: fewer if the pool is too small for them."""
        self.clear()
        budget = self.engine.parts.scheduler.budget.max_batched_tokens
        lead = 2 * ceil(decodes * context / (budget - decodes)) + 2 * AHEAD  # steps, at most, until all decode
        answer = lead + steps + 2 * AHEAD
        prompts = ceil((steps + 2 * AHEAD) * budget / context) if chunks else 0
        decodes = self.fit(decodes, context + answer)
        self.submit(decodes, context, answer)
        if not any(self.run(1)[0].decode_tokens == decodes for _ in range(lead)):
            raise RuntimeError(f"{decodes} requests do not decode together")
        self.submit(prompts, context, 1)
        self.run(AHEAD)
        self.runner.launches.clear()
        return decodes


@contextmanager
def opened(day: Day, config: ModelConfig, weights: Weights, **options: Any) -> Iterator[GPULoad]:
    """An engine over weights that several share."""
    start = time.perf_counter()
    with NanoServingEngine(config, weights, **{**(DRY if day.dry else {}), **options}) as engine:
        yield GPULoad(engine, time.perf_counter() - start)


def weights_of(config: ModelConfig, device: torch.device, scheme: str | None) -> Weights:
    """Random weights. With a scheme, the matrices of the layers are quantized, one after the other."""
    weights = random_weights(config, device)
    if scheme is None:
        return weights
    matrices = [name for name, part in config.layers[0].tensors(config).items() if part.inputs]

    def quantized(layer: LayerWeights) -> LayerWeights:
        return layer | {name: quantize(layer[name], scheme) for name in matrices}

    return replace(weights, layers=[quantized(layer) for layer in weights.layers])


class OnDemand(AbstractContextManager["OnDemand"]):
    """Opens an engine when the first row is measured on it. If the folder has all its rows, none is opened. If it
    cannot be opened, each row says why, and it is not tried again."""

    def __init__(self, open: Callable[[], AbstractContextManager[GPULoad]]) -> None:
        self._open = open
        self._stack = ExitStack()
        self._load: GPULoad | None = None
        self._failure: str | None = None

    def measure(self, function: Callable[..., Row], *arguments: Any, **more: Any) -> Callable[[], Row]:
        """A call of the function with the engine as its first argument."""

        def call() -> Row:
            if self._failure is not None:
                raise RuntimeError(f"the engine could not be opened: {self._failure}")
            if self._load is None:
                try:
                    self._load = self._stack.enter_context(self._open())
                except Exception as error:
                    self._failure = f"{type(error).__name__}: {error}"
                    raise
            return function(self._load, *arguments, **more)

        return call

    def __exit__(self, *_: object) -> None:
        self._load = None
        self._stack.close()
        gc.collect()  # graphs and runner refer to each other, and the next engine needs their memory
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


class Engines:
    """Engines of one model, one after the other. They share its weights, which are made for the first of them; with a
    scheme, they are quantized."""

    def __init__(self, day: Day, model: str, scheme: str | None = None) -> None:
        self.model = model
        self._day, self._config = day, day.config(model)
        self._weights = cache(partial(weights_of, self._config, day.device, scheme))

    def open(self, way: str, **options: Any) -> OnDemand:
        """An engine of this way to run, with these options."""
        return OnDemand(lambda: opened(self._day, self._config, self._weights(), **WAYS[way], **options))


def ready(load: GPULoad) -> Row:
    """The time until the engine can serve: compilation, sizing of the pool, recording of graphs; and its pool."""
    return {"seconds": load.ready_seconds, "pages": load.gauges.pages_total}


def steady(load: GPULoad, decodes: int, context: int, steps: int, chunks: bool, limit: Device) -> Row:
    """The time of decode steps, or of decodes with chunks of prompts; beside the roofline, and what the host does.

    `of_memory` is the share of the time that reading weights, keys and values and writing new ones takes. The roofline
    also has arithmetic, and the activations that the device's cache does not hold."""
    decodes = load.settle(decodes, context, steps, chunks)
    ran = [step for step in load.run(steps) if (step.decode_tokens, step.prefill_tokens > 0) == (decodes, chunks)]
    if not ran:
        raise RuntimeError("the load was not steady: no step was of the kind that is measured")
    middle = ran[len(ran) // 2]
    pieces = [(piece.start, piece.length) for piece in middle.batch.slices]
    cost = CostModel(load.engine.parts.model.config, cache=limit.cache).pieces(pieces, middle.decode_tokens)
    seconds, roofline = median(step.seconds for step in ran), predict(cost, limit).seconds
    moved = (cost.bytes - cost.total.activations) / limit.bytes_per_second
    return {
        "requests": decodes,
        "steps": len(ran),
        "tokens": median(step.decode_tokens + step.prefill_tokens for step in ran),
        "ms": seconds * 1e3,
        "ms_range": [min(step.seconds for step in ran) * 1e3, max(step.seconds for step in ran) * 1e3],
        "roofline_ms": roofline * 1e3,
        "of_roofline": roofline / seconds,
        "of_memory": moved / seconds,
        "l2_bytes": limit.cache,
        "host_ms": host_ms(ran, load.runner.launches),
    }


def host_ms(steps: Sequence[Step], launches: Sequence[float]) -> dict[str, float]:
    """Milliseconds of the host in a step, by part. One step ahead, they are spent while the device works."""
    parts = {part: fmean(getattr(step, part) for step in steps) * 1e3 for part in ("plan", "pack", "commit")}
    return {**parts, "launch": fmean(launches) * 1e3}


def served(load: GPULoad, clients: int, prompt: int, answer: int, rounds: int = 1, **asked: Any) -> Row:
    """A closed loop of clients that start together: each sends its next request when its last is answered, until there
    were as many as `rounds` for each. From the first step to the last. There are as many clients as fit into the pool.
    """
    load.clear()
    clients = load.fit(clients, prompt + answer)
    load.submit(min(clients, 2), prompt, 2, **{**asked, "least": None})
    load.run()
    before, requests = load.gauges, iter(load.requests(clients * rounds, prompt, answer, **asked))
    for first in islice(requests, clients):
        load.engine.add_request(*first)
    start = time.perf_counter()
    steps = load.run(behind=requests)
    seconds = time.perf_counter() - start
    tokens = sum(event.token is not None for step in steps for event in step.events)
    between = sorted(chain.from_iterable(repeat(step.seconds * 1e3, step.decode_tokens) for step in steps))
    return {
        "requests": clients * rounds,
        "clients": clients,
        "tokens": tokens,
        "seconds": seconds,
        "tokens_per_second": tokens / seconds,
        "itl_ms": {"median": median(between), "p99": between[len(between) * 99 // 100]},  # of decoded tokens
        "preemptions": load.gauges.preemptions - before.preemptions,
        "prefix_hits": load.gauges.hit_tokens - before.hit_tokens,
        "pages": {"total": before.pages_total, "most": max(step.pages for step in steps)},
        "decode_steps": total([step for step in steps if not step.prefill_tokens]),
        "prefill_steps": total([step for step in steps if step.prefill_tokens]),
    }


def total(steps: Sequence[Step]) -> dict[str, float]:
    """Their number, their seconds and their tokens."""
    return {
        "steps": len(steps),
        "seconds": sum(step.seconds for step in steps),
        "tokens": sum(step.decode_tokens + step.prefill_tokens for step in steps),
    }

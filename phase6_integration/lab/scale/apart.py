"""`python -m phase6_integration.lab scale.apart`: prefill and decode in two processes, beside chunked prefill in one.

The pages of both processes are in shared memory, and each process may allocate a part of them. One computes prompts,
and hands over each with its first token and the list of its pages. The other continues there, in pages of its own, and
sends the list back at the end. Each has one thread; the engine beside them, with chunked prefill, has two.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import numpy as np
import torch
from rich.console import Console
from torch import Tensor
from torch.multiprocessing import get_context

from phase0_request.core import EngineCore, Step
from phase0_request.lab.report import at_least_one, finish, parser, section
from phase0_request.params import SamplingParams
from phase0_request.request import Request
from phase0_request.support.machine import cores
from phase1_kv_pool.cache import PagedCache
from phase1_kv_pool.layer import KVLayer
from phase1_kv_pool.pool import KVPool
from phase2_prefill_decode.lab.shapes import SHAPES
from phase2_prefill_decode.loading.config import ModelConfig
from phase2_prefill_decode.model import Model, sampler_for
from phase2_prefill_decode.step.runner import ModelRunner
from phase3_chunked_prefill.budget import TokenBudget
from phase5_continuous.scheduler import Scheduler

SHAPE, PAGE_SIZE = "17m", 16
PREFILL_PAGES, DECODE_PAGES = 4096, 2048
RUNNING = 64
WHOLE = 1 << 16  # tokens: a chunk that cuts no prompt
CHUNKS = (128, 512, WHOLE)
PROMPTS, ANSWER = (128, 512), 96  # tokens: the shortest and the longest prompt, and every answer
SHARE = 0.7  # of the lower throughput: the rate at which requests arrive, when latency is measured
Core = EngineCore[Scheduler, Any]


class Arrival(NamedTuple):
    seconds: float  # after the start
    prompt: tuple[int, ...]


@dataclass(slots=True)
class Served:
    """When the tokens of a request were generated, and which."""

    arrival: float
    times: list[float]
    tokens: list[int]


# region caches
class PrefillCache(PagedCache):
    """Keeps the pages of an ended request until the decode process sends them back."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        super().__init__(num_pages, page_size)
        self.handed_over: dict[str, list[int]] = {}

    def release(self, request: Request) -> None:
        self.handed_over[request.id] = pages = [*self.table(request)]
        self.allocator.share(pages)
        super().release(request)


class DecodeCache(PagedCache):
    """Begins the page table of a request with the pages that the prefill process has filled."""

    def __init__(self, num_pages: int, page_size: int, of_prefill: int) -> None:
        super().__init__(num_pages, page_size)
        self.allocator.allocate(of_prefill)  # the first ones, for good: only the other process allocates those
        self.prompts: dict[str, list[int]] = {}

    def cached_tokens(self, request: Request) -> int:
        return len(request.prompt_tokens) - 1  # the token after the prompt was drawn by prefill

    def attach(self, request: Request) -> int:
        super().attach(request)
        self.allocator.share(pages := self.prompts[request.id])
        self.table(request).extend(pages)
        return self.cached_tokens(request)


# endregion


def trace(count: int, rate: float | None, seed: int = 0) -> list[Arrival]:
    """Prompts of random tokens. Without a rate, all are there at the start."""
    draw, now = np.random.default_rng(seed), 0.0
    arrivals = []
    for _ in range(count):
        now += draw.exponential(1 / rate) if rate else 0.0
        tokens = draw.integers(SHAPES[SHAPE].vocab_size, size=draw.integers(*PROMPTS))
        arrivals.append(Arrival(now, tuple(tokens.tolist())))
    return arrivals


def request(number: int, prompt: Sequence[int], tokens: int, arrival: float) -> Request:
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    return Request(f"{number}", tuple(prompt), params, arrival=arrival)


def core_of(model: Model, pool: KVPool, cache: PagedCache, budget: TokenBudget) -> Core:
    scheduler = Scheduler(cache, (), budget, max_running=RUNNING)
    return EngineCore(scheduler, ModelRunner(model.decoder, pool, cache, sampler_for(model, 0)))


def steps(
    core: Core, arrivals: Sequence[Arrival], tokens: int, reserve: Callable[[Arrival], bool], idle: Callable[[], None]
) -> Iterator[Step]:
    """Submit requests when they have arrived and fit, and run to the end."""
    start, left = time.perf_counter(), [*enumerate(arrivals)][::-1]
    while left or core.has_work:
        while left and start + left[-1][1].seconds <= time.perf_counter() and reserve(left[-1][1]):
            number, arrival = left.pop()
            core.submit(request(number, arrival.prompt, tokens, start + arrival.seconds))
        if core.has_work and (step := core.step()) is not None:
            yield step
        else:
            time.sleep(1e-4)
        idle()


def together(arrivals: Sequence[Arrival], chunk: int) -> list[Served]:
    """One engine with all threads, and chunked prefill."""
    torch.set_num_threads(cores())
    model, pages = Model.random(SHAPES[SHAPE], device="cpu"), PREFILL_PAGES + DECODE_PAGES
    pool, cache = KVPool(model.config.kv_layout(PAGE_SIZE), pages), PagedCache(pages, PAGE_SIZE)
    core, ended = core_of(model, pool, cache, TokenBudget(chunk, chunk + RUNNING)), dict[int, Served]()
    for step in steps(core, arrivals, ANSWER, lambda _: True, lambda: None):
        for event in step.events:
            if event.finish_reason is not None:
                of = event.request
                ended[int(of.id)] = Served(of.arrival, [*of.times.tokens], [*of.output_tokens])
    return [ended[number] for number in range(len(arrivals))]


# region prefill
def apart(arrivals: Sequence[Arrival]) -> list[Served]:
    """Two processes with one thread each: this one computes the prompts."""
    torch.set_num_threads(1)
    model, cache = Model.random(SHAPES[SHAPE], device="cpu"), PrefillCache(PREFILL_PAGES, PAGE_SIZE)
    pool = KVPool(model.config.kv_layout(PAGE_SIZE), PREFILL_PAGES + DECODE_PAGES)
    context = get_context("spawn")
    pipe, other = context.Pipe()
    tensors = [tensor.share_memory_() for tensor in pool.tensors]  # type: ignore[no-untyped-call]
    process = context.Process(target=decode, args=(other, model.config, PREFILL_PAGES, tensors), daemon=True)
    process.start()
    pipe.recv()  # it is ready
    core, begun, ended = (
        core_of(model, pool, cache, TokenBudget(WHOLE, WHOLE)),
        dict[int, Served](),
        dict[int, Served](),
    )

    held = 0  # pages of prompts that wait, are computed, or are read by the other process

    def reserve(arrival: Arrival) -> bool:
        nonlocal held
        pages = -(-len(arrival.prompt) // PAGE_SIZE)
        fits = held + pages <= PREFILL_PAGES
        held += pages * fits
        return fits

    def receive() -> None:
        nonlocal held
        while pipe.poll():
            number, pages, times, tokens = pipe.recv()
            cache.allocator.release(pages)
            held -= len(pages)
            first = begun[number]
            ended[number] = Served(first.arrival, first.times + times, first.tokens + tokens)

    for step in steps(core, arrivals, 1, reserve, receive):
        for event in step.events:
            number, of = int(event.request.id), event.request
            begun[number] = Served(of.arrival, [*of.times.tokens], [*of.output_tokens])
            pipe.send((number, (*of.prompt_tokens, *of.output_tokens), ANSWER - 1, cache.handed_over.pop(of.id)))
    while len(ended) < len(arrivals):
        pipe.poll(None)
        receive()
    process.terminate()
    process.join()
    return [ended[number] for number in range(len(arrivals))]


# endregion


# region decode
def decode(pipe: Connection, config: ModelConfig, of_prefill: int, tensors: list[Tensor]) -> None:
    """The other process: it continues what it is handed, and sends the pages back at the end."""
    torch.set_num_threads(1)
    model, pages = Model.random(config, device="cpu"), len(tensors[0])
    pool, cache = KVPool(config.kv_layout(PAGE_SIZE), 1), DecodeCache(pages, PAGE_SIZE, of_prefill)
    pool.num_pages, pool.layers = pages, [KVLayer(*pair) for pair in zip(tensors[::2], tensors[1::2], strict=True)]
    core = core_of(model, pool, cache, TokenBudget(RUNNING, RUNNING))
    pipe.send(None)
    while True:
        while not core.has_work or pipe.poll():
            number, tokens, more, given = pipe.recv()
            cache.prompts[f"{number}"] = given
            core.submit(request(number, tokens, more, time.perf_counter()))
        for event in (core.step() or Step()).events:
            if event.finish_reason is not None:
                of = event.request
                pipe.send((int(of.id), cache.prompts.pop(of.id), [*of.times.tokens], [*of.output_tokens]))


# endregion


def figures(served: Sequence[Served]) -> dict[str, float]:
    gaps = [1e3 * (b - a) for each in served for a, b in pairwise(each.times)]
    ttft = [1e3 * (each.times[0] - each.arrival) for each in served]
    seconds = max(each.times[-1] for each in served) - min(each.arrival for each in served)
    values = {"tokens_per_second": sum(len(each.tokens) for each in served) / seconds}
    for name, numbers in (("itl", gaps), ("ttft", ttft)):
        values |= {f"{name}_p{q}_ms": float(np.percentile(numbers, q)) for q in (50, 99)}
    return values


def main(arguments: list[str] | None = None) -> int:
    p = parser("phase6_integration.lab scale.apart", __doc__)
    p.add_argument("-n", "--requests", type=at_least_one, default=100, help="(%(default)s)")
    options, console = p.parse_args(arguments), Console(highlight=False)
    ways: dict[str, Callable[[Sequence[Arrival]], list[Served]]] = {
        "whole" if chunk == WHOLE else f"chunk_{chunk}": lambda arrivals, chunk=chunk: together(arrivals, chunk)
        for chunk in CHUNKS
    } | {"apart": apart}
    burst, outputs = {}, []
    for name, way in ways.items():
        way(trace(2, None))  # compiles
        served = way(trace(options.requests, None))
        burst[name] = figures(served)["tokens_per_second"]
        outputs.append([each.tokens for each in served])
    same = all(each == outputs[0] for each in outputs)
    rate = SHARE * min(burst.values()) / ANSWER
    rows = {
        name: {**figures(way(trace(options.requests, rate))), "burst_tokens_per_second": burst[name]}
        for name, way in ways.items()
    }
    section(console, f"{rate:.1f} requests a second; the last column: all at once", rows, 1)
    console.print(f"The tokens of all ways are {'the same' if same else 'NOT the same'}.")
    finish(p, options, arguments, {"rate": rate, "same_tokens": same, "ways": rows}, console=console)
    return 0 if same else 1

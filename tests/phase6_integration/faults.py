"""Engines that fail: the bundled one with a fault in it. Each function is a factory for AsyncEngine."""

import dataclasses
import logging
import os
import time
from collections.abc import Callable
from typing import Any

from phase0_request import Batch, Request, StepOutput
from phase1_kv_pool import PagedCache
from phase5_continuous import Scheduler
from phase5_continuous.extras.invariants import Checks
from phase6_integration.engine.isolation import IsolatingCore, IsolatingRunner, LoadShedding
from phase6_integration.engine.options import EngineOptions
from phase6_integration.process.engine_process import LoadedEngine, bundled_engine
from phase6_integration.process.messages import Ready

POISON = 7  # a token of a prompt that the model cannot bear
NAN = 8  # a token after which the model says NaN


def _with(change: Callable[[Any, Any], None]) -> Callable[[EngineOptions], LoadedEngine]:
    def factory(options: EngineOptions) -> LoadedEngine:
        made = bundled_engine(dataclasses.replace(options, threads=1))
        change(made.core, made.core.scheduler)
        return made

    return factory


def _runner(core: Any) -> Any:
    return core.runner.runner  # within the one that isolates


def _decoder_that(compute: Callable[[Any, Any], Any]) -> Callable[[Any, Any], None]:
    """Computes a step by `compute(packed, forward)`, which may call `forward()`, the decoder itself."""

    def change(core: Any, _: Any) -> None:
        decoder = _runner(core).decoder

        class Decoder:
            def __getattr__(self, name: str) -> Any:
                return getattr(decoder, name)

            def __call__(self, packed: Any, layers: Any, out: Any = None) -> Any:
                return compute(packed, lambda: decoder(packed, layers, out))

        _runner(core).decoder = Decoder()

    return change


def _raises(packed: Any, forward: Callable[[], Any]) -> Any:
    """If the poison is among the tokens of the step."""
    if (packed.tokens == POISON).any():
        raise RuntimeError("secret: /home/model/weights")
    return forward()


def _says_nan(packed: Any, forward: Callable[[], Any]) -> Any:
    """In the logits of each request that ends in NAN."""
    last = packed.tokens if packed.last is None else packed.tokens[packed.last]
    logits, hidden = forward()
    return logits.masked_fill((last[: len(logits)] == NAN)[:, None], float("nan")), hidden


def _hang(_: Any) -> None:
    time.sleep(3600)


def _die(_: Any) -> None:
    os._exit(9)


def _bad_sampler(core: Any, _: Any) -> None:
    """It fails on requests with top_k=13."""
    sampler = _runner(core).sampler
    pack = sampler.pack

    def poisoned(batch: Batch) -> Any:
        if any(piece.request.params.top_k == 13 for piece in batch):
            raise RuntimeError("secret: no sampling for you")
        return pack(batch)

    sampler.pack = poisoned


def _bad_scheduler(_: Any, scheduler: Any) -> None:
    """It loses its mind when it is to commit for a request with the poison in its prompt."""
    commit = scheduler.commit

    def poisoned(batch: Any, output: Any, now: float) -> Any:
        if any(POISON in piece.request.prompt_tokens for piece in batch):
            raise KeyError("a seat is lost")
        return commit(batch, output, now)

    scheduler.commit = poisoned


def _three(core: Any, scheduler: Any) -> None:
    """Each is a fault of its own request, so one engine can have them all."""
    for change in (_decoder_that(_raises), _decoder_that(_says_nan), _bad_sampler):
        change(core, scheduler)


class _Launched:
    def __init__(self, batch: Batch) -> None:
        self.batch = batch

    def output(self) -> StepOutput:
        time.sleep(0.002)
        return StepOutput([_next(piece.request) if piece.completes else None for piece in self.batch])


def _next(request: Request) -> int:
    """The prompt again and again, each token 300 higher: those below are special, or bytes."""
    return request.prompt_tokens[len(request.output_tokens) % len(request.prompt_tokens)] + 300


class _NoModel:
    """A runner without a model, for an engine process without torch. `fault` may do something to a step."""

    def __init__(self, fault: Callable[[Batch], None]) -> None:
        self.fault = fault

    def pack(self, batch: Batch) -> Batch:
        self.fault(batch)
        return batch

    def launch(self, batch: Batch) -> _Launched:
        return _Launched(batch)


def _poisoned(batch: Batch) -> bool:
    return any(POISON in piece.request.prompt_tokens for piece in batch)


def _light(options: EngineOptions, fault: Callable[[Batch], None]) -> LoadedEngine:
    """The engine process, its loop, its scheduler and what isolates requests, without a model: it is up in a moment."""
    pages = options.kv_cache_pages or 1024
    scheduler = Scheduler(PagedCache(pages, options.page_size), max_running=options.running(on_gpu=False))
    runner = IsolatingRunner(_NoModel(fault), LoadShedding(scheduler))
    core = IsolatingCore(scheduler, runner, time.monotonic)
    core.observers += [Checks(scheduler)] if options.more.get("check_invariants") else []
    return LoadedEngine(core, Ready(min(2048, pages * options.page_size), pages, options.page_size, "", ""))


def light(options: EngineOptions) -> LoadedEngine:
    """Poison kills it."""
    return _light(options, lambda batch: _die(batch) if _poisoned(batch) else None)


def light_hangs(options: EngineOptions) -> LoadedEngine:
    return _light(options, lambda batch: _hang(batch) if _poisoned(batch) else None)


def light_breaks(options: EngineOptions) -> LoadedEngine:
    """The first poison breaks it for good."""
    broken: list[Batch] = []

    def fault(batch: Batch) -> None:
        broken.extend([batch] * _poisoned(batch))
        if broken:
            raise RuntimeError("an illegal memory access was encountered")

    return _light(options, fault)


def light_scheduler_raises(options: EngineOptions) -> LoadedEngine:
    made = _light(options, lambda _: None)
    _bad_scheduler(made.core, made.core.scheduler)
    return made


def no_engine(options: EngineOptions) -> LoadedEngine:
    raise MemoryError("no memory is left for keys and values")


def never(options: EngineOptions) -> LoadedEngine:
    logging.getLogger("phase2_prefill_decode.kernels").info("compiling, 1 of 3 done")
    time.sleep(3600)
    raise MemoryError("it is late")


requests_fail = _with(_three)

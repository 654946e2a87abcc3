"""Stages of `gpu_day`: requests served from the first step to the last, by this engine and by transformers."""

import time
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from phase2_prefill_decode.lab.random_weights import random_peer
from phase6_integration.lab.gpu.loads import Engines, random_prompts, ready, served
from phase6_integration.lab.gpu.rows import Day, Row
from phase6_integration.lab.gpu.steps import large, timed

# No top-p: random weights give flat logits, and a nucleus of these is the worst case of the sampler.
GREEDY, BOTH = {"greedy": 0.0}, {"greedy": 0.0, "temperature": 1.0}
SERVED = (256, 1024, 1024)  # requests, tokens of each prompt and of each answer
ALONE = (1, 1024, 256)
FEW = (ALONE, (8, 1024, 256))
BESIDE = (64, 1024, 256)


def serve_8b(day: Day) -> None:
    """256 requests that arrive together: as the engine ships, with larger pages, and then without its parts."""
    engines = Engines(day, large(day))
    serve(day, engines, "ahead", BOTH)
    serve(day, engines, "ahead", GREEDY, page_size=64)
    for way in ("graphs", "eager"):
        serve(day, engines, way, GREEDY)


def serve_small(day: Day) -> None:
    """Requests, decode steps and mixed steps of a small model, where the host matters most."""
    model = str(day.some(("0.6b",), ("tiny",))[0])
    ways = day.some(("ahead", "pieces"), ("ahead",))
    for way in ways:
        serve(day, Engines(day, model), way, GREEDY)
    timed(day, model, ("ahead",), chunks=False)
    timed(day, model, ways, chunks=True)


def serve_quantized(day: Day) -> None:
    """One request and many, of a model with quantized weights."""
    for scheme in ("int4", "fp8"):
        with Engines(day, large(day), scheme).open("ahead") as engine:
            for load in day.some((ALONE, SERVED), ((1, 20, 4), (3, 20, 4))):
                day.add(engine.measure(served, *load), what="serve", scheme=scheme, asked=load[0])
            day.add(engine.measure(ready), what="ready", scheme=scheme)


def serve_drafts(day: Day) -> None:
    """A few requests with long answers: without drafts, and with those of each method. How many are accepted is up to
    how much random weights repeat themselves, and is in the row."""
    engines = Engines(day, large(day))
    for method in (None, "ngram", "suffix"):
        drafts = {"speculative_config": {"method": method}} if method else {}
        with engines.open("graphs", **drafts) as engine:
            for load in day.some(FEW, ((1, 20, 8), (3, 20, 8))):
                day.add(engine.measure(served, *load), what="serve", drafts=method, asked=load[0])


def serve(day: Day, engines: Engines, way: str, kinds: Mapping[str, float], page_size: int = 16) -> None:
    """Serve greedy requests, or with a temperature, on one engine."""
    with engines.open(way, page_size=page_size) as engine:
        key = {"model": engines.model, "way": way, "page_size": page_size}
        for kind, temperature in kinds.items():
            measure = engine.measure(partial(served, temperature=temperature), *day.some(SERVED, (3, 20, 4)))
            day.add(measure, what="serve", **key, kind=kind)
        day.add(engine.measure(ready), what="ready", **key)


# Other engines, on the same workload.


def beside(day: Day) -> None:
    """transformers' continuous batching and this engine in one process, one after the other, each warm."""
    batch, context, answer = day.some(BESIDE, (2, 8, 3))
    for model in reversed(day.models):  # the larger one first
        labels = {"model": model, "requests": batch, "prompt": context, "answer": answer}
        with Engines(day, model).open("ahead") as engine:
            day.add(engine.measure(served, batch, context, answer), engine="nano-serving", **labels)
        day.add(partial(transformers, day, model, batch, context, answer), engine="transformers", **labels)


def transformers(day: Day, model: str, batch: int, context: int, answer: int) -> Row:
    """One manager of transformers with its cache and its graphs: it is made for the workload and warmed by it. Then it
    gets the same amount of work, and the clock starts with it: as this engine's does, with all requests queued."""
    from transformers import ContinuousBatchingConfig, GenerationConfig

    make: Any = GenerationConfig
    size: Any = ContinuousBatchingConfig
    config = day.models[model]
    with day.device:
        peer = random_peer(config, getattr(torch, config.dtype))
    how = make(do_sample=False, max_new_tokens=answer, eos_token_id=-1, pad_token_id=0)
    small = size(num_blocks=8, max_batch_tokens=64) if day.dry else None
    options = {"generation_config": how, "continuous_batching_config": small}
    warming, prompts = (random_prompts(config, batch, context, seed) for seed in (0, 1))
    peer.generate_batch(warming, persistent_manager=True, **options)
    manager = peer.init_continuous_batching(**options)  # the same one, stopped
    attention = peer.config._attn_implementation
    manager.background_thread_status.clear()  # a manager that has stopped takes requests once it starts
    manager.add_requests(inputs=prompts, max_new_tokens=answer)
    start = time.perf_counter()
    manager.start()
    tokens = answered(manager, len(prompts))
    seconds = time.perf_counter() - start
    manager.stop(block=True)
    peer.destroy_cached_continuous_batching_manager()
    return {"tokens": tokens, "seconds": seconds, "tokens_per_second": tokens / seconds, "attention": attention}


def answered(manager: Any, missing: int) -> int:
    """Wait until a running manager has answered so many requests, and count the tokens of the answers."""
    tokens = 0
    while missing:
        result = manager.get_result(timeout=1)
        if result is None and not manager.is_running():
            raise RuntimeError(f"the manager of transformers ended, and {missing} requests have no answer")
        if result is not None and result.is_finished():
            if result.error is not None:
                raise RuntimeError(f"transformers failed a request: {result.error}")
            missing -= 1
            tokens += len(result.generated_tokens)
    return tokens

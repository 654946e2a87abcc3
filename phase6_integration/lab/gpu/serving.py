"""Stages of `gpu_day`: requests served from the first step to the last, by this engine and by transformers."""

import time
from functools import partial
from typing import Any

import torch

from phase2_prefill_decode.lab.random_weights import random_peer
from phase6_integration.lab.gpu.loads import Engines, random_prompts, ready, served
from phase6_integration.lab.gpu.rows import Day, Row
from phase6_integration.lab.gpu.steps import large, timed

ALL = ((256, 1024, 1024, 1),)  # clients, tokens of each prompt and of each answer, answers to each client
LOOPS = ((256, 128, 1024, 2), (64, 128, 1024, 2), (1, 128, 1024, 1), (128, 128, 1024, 2))
ONE_ROUND = tuple((clients, 128, 1024, 1) for clients in (1, 64, 256))
SERVED: dict[str, tuple[str | None, str | None, tuple[tuple[int, ...], ...]]] = {  # weights, keys and values; workloads
    "serve": (None, None, (*LOOPS, *ALL)),
    "serve_kv_fp8": (None, "fp8", ALL),
    "serve_all_fp8": ("fp8", "fp8", (*ONE_ROUND, *ALL)),
    "serve_fp8": ("fp8", None, (*ONE_ROUND, *ALL)),
    "serve_int4": ("int4", None, ((1, 128, 1024, 1), *ALL)),
}
FAMILIES = "OLMoE-1B-7B", "Gemma-3-1B", "gpt-oss-20b", "LFM2-1.2B"  # experts; windows; both, and sinks; states
RANDOM_LENGTHS = (256, 1024, 1024)  # each from 100 tokens on: the bench of nano-vllm
BESIDE = (64, 1024, 256)


def serve(day: Day) -> None:
    """Closed loops of clients of a model of 8B, as the engine ships, over the formats of the stage."""
    scheme, kv, loads = SERVED[day.stage]
    engines = Engines(day, large(day), scheme)
    with engines.open("ahead", **({"kv_cache_dtype": kv} if kv else {})) as engine:
        for clients, prompt, answer, rounds in day.some(loads, ((1, 20, 4, 1), (2, 20, 4, 2))):
            measure = engine.measure(served, clients, prompt, answer, rounds)
            day.add(measure, what="serve", model=engines.model, clients=clients, prompt=prompt, answer=answer)
        day.add(engine.measure(ready), what="ready", model=engines.model)


def serve_families(day: Day) -> None:
    """Clients of models that are not built like Llama."""
    for model in FAMILIES:
        with Engines(day, model).open("ahead") as engine:
            for clients, prompt, answer in day.some(((64, 1024, 256), (1, 1024, 256)), ((2, 20, 4),)):
                measure = engine.measure(served, clients, prompt, answer)
                day.add(measure, what="serve", model=model, clients=clients, prompt=prompt, answer=answer)
            day.add(engine.measure(ready), what="ready", model=model)


def serve_small(day: Day) -> None:
    """Mixed steps, requests of random lengths and decode steps of a small model, where the host matters most."""
    model = str(day.some(("0.6b",), ("tiny",))[0])
    ways = day.some(("pieces", "ahead", "eager"), ("ahead",))
    timed(day, model, ways, chunks=True)
    (clients, prompt, answer), least = day.some((RANDOM_LENGTHS, 100), ((3, 20, 4), 2))
    for way in ways[:2]:
        with Engines(day, model).open(way) as engine:
            measure = engine.measure(partial(served, least=least, temperature=0.6), clients, prompt, answer)
            day.add(measure, what="random_lengths", model=model, way=way)
    timed(day, model, ("ahead",), chunks=False)


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
    """Wait until a running manager has answered this many requests, and count the tokens of the answers."""
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

"""Stages of `gpu_day`: steps beside the roofline, and a profile of them."""

from collections.abc import Iterable
from statistics import median

import torch

from phase0_request.core import Step
from phase2_prefill_decode.lab.roofline import Device
from phase6_integration.lab.gpu.kernels import limits
from phase6_integration.lab.gpu.loads import Engines, GPULoad, ready, steady
from phase6_integration.lab.gpu.rows import Day, Row
from phase6_integration.lab.gpu.trace import busy, idle_share, profiled, time_per_kernel

DECODES = (256, 1, 64)  # requests that decode together: the two ends first
MIXED = (64, 192)  # the same, beside chunks of prompts


def large(day: Day) -> str:
    """The model that most of the time goes to."""
    return str(day.some(("8b",), ("tiny",))[0])


def steps_8b(day: Day) -> None:
    """Decode steps in every way to run them."""
    timed(day, large(day), ("ahead", "graphs", "eager"), chunks=False)


def mixed(day: Day) -> None:
    """Decodes beside chunks that fill the token budget: kernel by kernel, and in recorded pieces."""
    timed(day, large(day), day.some(("ahead", "eager", "pieces"), ("ahead", "eager")), chunks=True)


def timed(day: Day, model: str, ways: Iterable[str], chunks: bool) -> None:
    """Steps beside the roofline of what was measured here: as fast as memory is read and matrices multiply."""
    best = limits(day)
    bandwidth = max(best["copy_gb_per_second"], best["read_gb_per_second"])
    cache = 0 if day.dry else torch.cuda.get_device_properties(day.device).L2_cache_size
    limit = Device("measured", best["gflops_bfloat16"] * 1e9, bandwidth * 1e9, cache=cache)
    engines = Engines(day, model)
    for way in ways:
        with engines.open(way) as engine:
            key = {"model": model, "way": way, "chunks": chunks}
            for decodes, context, steps in settings(day, chunks):
                measure = engine.measure(steady, decodes, context, steps, chunks, limit)
                day.add(measure, what="steps", **key, decodes=decodes, context=context)
            day.add(engine.measure(ready), what="ready", **key)


def settings(day: Day, chunks: bool) -> list[tuple[int, int, int]]:
    """(requests that decode, tokens of each, steps to measure) of each load."""
    batches = day.some(MIXED if chunks else DECODES, (2,))
    context, steps = day.some((1024, 50), (20, 4))
    return [(decodes, context, steps) for decodes in batches]


def profiles(day: Day) -> None:
    """The time of each kernel, and the share of the time in which the device is idle. A stage of its own, because a
    profiler makes every launch slower: with eager launches the share is an upper bound."""
    small = day.some((("0.6b", "pieces", (True, False)),), ())
    for model, way, kinds in ((large(day), "ahead", (False, True)), *small, (large(day), "eager", (False, True))):
        with Engines(day, model).open(way) as engine:
            for chunks in kinds:
                for decodes, context, steps in settings(day, chunks):
                    measure = engine.measure(profile, day, decodes, context, steps, chunks)
                    day.add(measure, model=model, way=way, chunks=chunks, decodes=decodes)


def profile(load: GPULoad, day: Day, decodes: int, context: int, steps: int, chunks: bool) -> Row:
    """What the device does in steady steps."""
    decodes = load.settle(decodes, context, steps, chunks)
    ran: list[Step] = []
    ordered = profiled(day, lambda: ran.extend(load.run(steps)))
    return {
        "requests": decodes,
        "steps": len(ran),
        "ms": median(step.seconds for step in ran) * 1e3,
        "device_ms": busy(ordered) / len(ran) / 1e3,
        "idle_share": idle_share(ordered),
        "kernels": time_per_kernel(ordered),
    }

"""Stages of `gpu_day`: steps beside the roofline, a profile of them, and the tuning of the decode kernel."""

from collections.abc import Iterable
from dataclasses import asdict
from functools import partial
from statistics import median

from phase0_request.core import Step
from phase2_prefill_decode.lab import tune as tuner
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
    limit = Device("measured", best["gflops_bfloat16"] * 1e9, bandwidth * 1e9)
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
    engines = Engines(day, large(day))
    for way in ("ahead", "eager"):
        with engines.open(way) as engine:
            for chunks in (False, True):
                for decodes, context, steps in settings(day, chunks):
                    name = f"{way}-{'mixed' if chunks else 'decode'}-{decodes}"
                    measure = engine.measure(profile, day, name, decodes, context, steps, chunks)
                    day.add(measure, model=large(day), way=way, chunks=chunks, decodes=decodes)


def profile(load: GPULoad, day: Day, name: str, decodes: int, context: int, steps: int, chunks: bool) -> Row:
    """What the device does in steady steps."""
    decodes = load.settle(decodes, context, steps, chunks)
    ran: list[Step] = []
    ordered = profiled(day, lambda: ran.extend(load.run(steps)), name)
    return {
        "requests": decodes,
        "steps": len(ran),
        "ms": median(step.seconds for step in ran) * 1e3,
        "device_ms": busy(ordered) / len(ran) / 1e3,
        "idle_share": idle_share(ordered),
        "kernels": time_per_kernel(ordered),
    }


def tune(day: Day) -> None:
    """The best splits and tiles of the decode kernel, as `python -m phase2_prefill_decode.lab tune` finds them."""
    for shape in tuner.SHAPES:
        day.add(partial(best, day, shape), **asdict(shape))


def best(day: Day, shape: tuner.Shape) -> Row:
    """The best splits and tiles of a shape."""
    seconds: tuner.Timer = (lambda shape, tuning, batch: 1 / tuning.chunk) if day.dry else tuner.on_gpu
    tuning, gain = tuner.best(shape, seconds)
    return asdict(tuning) | {"times_as_fast": gain}

"""How long calls take, on a CPU and on a GPU. Give many, each to another place: one alone would meet warm caches."""

import time
from collections.abc import Callable, Sequence
from functools import partial

import torch

Calls = Sequence[Callable[[], object]]

RUNS = 20
SECONDS = 0.4  # enough for the best of several runs: a run is only ever slowed down by what else a machine does


def clock_seconds(calls: Calls) -> float:
    """Seconds a call by the host's clock, at best; on a GPU until the GPU is done."""

    def run() -> float:
        start = time.perf_counter()
        for call in calls:
            call()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter() - start

    run()
    end = time.perf_counter() + SECONDS
    best = run()
    for _ in range(RUNS):
        if time.perf_counter() > end:
            break
        best = min(best, run())
    return best / len(calls)


def replay_seconds(calls: Calls) -> float:
    """Seconds a call on the GPU, at best, without the host: captured in a CUDA graph, as decode steps are."""
    for call in calls:
        call()  # Triton compiles now, for a capture does not allow it
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    event = partial(torch.cuda.Event, enable_timing=True)
    best = float("inf")
    for _ in range(RUNS):
        start, stop = event(), event()
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        best = min(best, start.elapsed_time(stop) / 1000)
    return best / len(calls)

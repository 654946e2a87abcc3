"""Timing of calls on a CPU and on a GPU. Pass many calls on different memory, so that the caches are not warm."""

import time
from collections.abc import Callable, Sequence
from functools import partial

import torch

Calls = Sequence[Callable[[], object]]

RUNS = 20
SECONDS = 0.2  # the best of several runs is used: other processes only ever slow a run down


def clock_seconds(calls: Calls) -> float:
    """Seconds for one call by the host's clock, best of several runs; waits for the GPU."""

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
    """Seconds for one call on the GPU, best of several runs, without the host: captured in a CUDA graph."""
    for call in calls:
        call()  # compiles Triton kernels, which is not allowed during a capture
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

"""`python -m phase2_prefill_decode.lab tune`: time splits and tiles of the decode kernel on a GPU, show the best."""

import argparse
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import product

import torch
from rich.console import Console

from phase1_kv_pool.lab.timing import replay_seconds
from phase1_kv_pool.layer import KVLayer
from phase2_prefill_decode.kernels.attention import AttentionMetadata
from phase2_prefill_decode.kernels.triton.tuning import Tuning, default


@dataclass(frozen=True, slots=True)
class Shape:
    """What the best tuning may depend on, beside the device."""

    head_dim: int
    group: int  # query heads per KV head
    page_size: int


KV_HEADS = 8
SHAPES = [Shape(128, group, page_size) for group, page_size in product((4, 8), (16, 64))]
BATCHES = ((1, 1024), (1, 32768), (16, 4096), (64, 2048), (256, 1536))  # sequences, tokens of each
CHUNKS = (128, 256, 512)
TILES = ((64, 4, 3), (64, 4, 2), (32, 4, 4), (32, 2, 3), (128, 4, 2), (128, 8, 2))  # tile, warps, stages
BYTES = 1 << 28  # of keys and values that one timing reads, at least: more than a cache holds

Timer = Callable[[Shape, Tuning, tuple[int, int]], float]


def best(shape: Shape, seconds: Timer) -> tuple[Tuning, float]:
    """Time every candidate on every batch. Returns the one with the least geometric mean of its times, and how many
    times faster than the default that is. A batch so counts by the ratio, whether it takes long or not."""
    means: dict[Tuning, float] = {}
    for tuning in (default(shape.group), *(Tuning(chunk, *tile) for chunk, tile in product(CHUNKS, TILES))):
        times = [seconds(shape, tuning, batch) for batch in BATCHES]
        means[tuning] = math.exp(sum(map(math.log, times)) / len(times))
    (_, by_default), *measured = means.items()
    tuning, mean = min(measured, key=lambda pair: pair[1])
    return tuning, by_default / mean


def on_gpu(shape: Shape, tuning: Tuning, batch: tuple[int, int]) -> float:
    """Seconds of a decode launch with its table and join, in a graph, over pages that no cache holds. Infinite for a
    candidate that takes more shared memory or registers than there are."""
    from triton.runtime.errors import OutOfResources

    from phase2_prefill_decode.kernels.triton.decode import decode

    sequences, tokens = batch
    size, pages = shape.head_dim, -(-tokens // shape.page_size)
    copies = -(-BYTES // (sequences * tokens * KV_HEADS * size * 4))
    new = partial(torch.randn, device="cuda", dtype=torch.bfloat16)
    kv = KVLayer(*(new(copies * sequences * pages, KV_HEADS, shape.page_size, size) for _ in "kv"))
    query = new(sequences, KV_HEADS * shape.group, size)
    tables = torch.randperm(len(kv.keys), device="cuda").int().view(copies, sequences, pages)
    starts = torch.arange(sequences + 1, device="cuda", dtype=torch.int32)
    lengths = torch.full_like(starts[1:], tokens)
    steps = [AttentionMetadata(starts, lengths, table, 1, tokens) for table in tables]
    run = partial(decode, query, kv, torch.empty_like(query), scale=size**-0.5, tuning=tuning)
    try:
        return replay_seconds([partial(run, step) for step in steps])
    except OutOfResources:
        return math.inf


def main(arguments: list[str] | None = None) -> int:
    p = argparse.ArgumentParser(prog="python -m phase2_prefill_decode.lab tune", description=__doc__)
    p.parse_args(arguments)
    if not torch.cuda.is_available():
        p.error("this needs a GPU, and torch sees none")
    for shape in SHAPES:
        tuning, gain = best(shape, on_gpu)
        Console().print(f"{shape}: {tuning}, {gain:.2f} times as fast as the default")
    return 0

"""`python -m phase1_kv_pool.lab bench`: the cost of allocating, writing and reading pages.

Allocator: pages allocated and freed a second, in a small pool and in a large one. Store: the bandwidth of each
implementation against a plain copy of the same bytes. Layout: reading a sequence head by head, with tokens before heads
and with heads before tokens.
"""

import argparse
import random
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor

from phase0_request.lab.record import record
from phase0_request.machine import describe
from phase1_kv_pool.allocator import PageAllocator
from phase1_kv_pool.kernels.store import STORE
from phase1_kv_pool.lab.timing import Calls, clock_seconds, replay_seconds
from phase1_kv_pool.layout import KVLayout
from phase1_kv_pool.pool import KVPool

POOLS = (1_000, 1_000_000)
PAGES_AT_ONCE = (1, 8, 64)
LAYER = KVLayout(layers=1, kv_heads=8, head_dim=128)  # a layer of Llama-3.1-8B or Qwen3-8B, bfloat16, pages of 16
TOKENS = (1, 8, 64, 512, 4096)
DECODE = 64  # up to so many tokens: one for each request, on its own page; more: a prompt, in whole pages
PAGE_SIZES = (16, 64)
SEQUENCE = 16_384
LEAVE_TOGETHER = 7


@dataclass(frozen=True, slots=True)
class Allocating:
    """Millions of pages allocated or freed a second, in a half-full pool of requests of `pages_at_once` pages."""

    pool: int
    pages_at_once: int
    oldest_leaves: float
    any_leaves: float  # random memory accesses; with a large pool the CPU waits for them


@dataclass(frozen=True, slots=True)
class Storing:
    """One implementation storing `tokens` tokens. A byte is read and written, so it counts twice."""

    way: str
    tokens: int
    microseconds: float
    gb_per_second: float


@dataclass(frozen=True, slots=True)
class Reading:
    """GB/s at which K and V of a sequence are read, head by head, in the two layouts that pages can have."""

    page_size: int
    pages: str  # "shuffled": through a page table; "neighbours": contiguous, without one
    tokens_first: float  # [pages, page_size, kv_heads, head_dim]
    heads_first: float  # [pages, kv_heads, page_size, head_dim]


def allocating(pool: int, n: int, events: int = 100_000) -> Allocating:
    """The best of five runs, each of `events` pages allocated and freed.

    A few requests are freed, then as many are allocated, so that pages move between requests. The time to iterate over
    the same requests and pages without an allocator is subtracted: with a million of them it is mostly cache misses.
    """

    def rate(leaving: Sequence[Sequence[int]]) -> float:
        allocator = PageAllocator(pool)
        live = [allocator.allocate(n) for _ in range(requests)]
        start = time.perf_counter()
        for group in leaving:
            for i in group:
                allocator.release(live[i])
            for i in group:
                live[i] = allocator.allocate(n)
        both = time.perf_counter() - start
        start = time.perf_counter()
        for group in leaving:
            for i in group:
                for _ in live[i]:
                    pass
            for i in group:
                live[i] = live[i]
        walking = time.perf_counter() - start
        return 2 * n * len(group) * len(leaving) / max(both - walking, 1e-9) / 1e6

    requests = pool // 2 // n
    together = min(LEAVE_TOGETHER, requests)
    groups = max(events // n // together, 1)
    rng = random.Random(0)
    oldest = [[(g * together + i) % requests for i in range(together)] for g in range(groups)]
    any_request = [rng.sample(range(requests), together) for _ in range(groups)]
    return Allocating(pool, n, *(max(rate(leaving) for _ in range(5)) for leaving in (oldest, any_request)))


def storing(device: torch.device, tokens: int, num_pages: int) -> Iterator[Storing]:
    """Time each implementation of this device, and a copy. Each call writes to other pages of a large pool."""
    pool = KVPool(LAYER, num_pages, device)
    heads, dim = LAYER.kv_heads, LAYER.head_dim
    fused = torch.randn(tokens, 4 * heads, dim, device=device).to(pool.dtype)  # as a layer computes q, k and v
    k, v = fused[:, -2 * heads : -heads], fused[:, -heads:]
    keys, values = pool.keys[0], pool.values[0]
    slots = list(_slots(tokens, pool))
    every = pool.num_slots // len(slots)

    def copy(place: int) -> None:
        keys.view(-1, heads, dim)[place : place + tokens].copy_(k)
        values.view(-1, heads, dim)[place : place + tokens].copy_(v)

    on_gpu = device.type == "cuda"
    calls: dict[str, Calls] = {
        way: [partial(STORE.load(way), keys, values, s, k, v) for s in slots]
        for way in ("reference", "cpu", *(["triton"] if on_gpu else []))
    }
    calls["copy"] = [partial(copy, i * every) for i in range(len(slots))]
    for way, each in calls.items():
        # On a GPU the first two synchronize to read the slots, which a CUDA graph forbids. Their time includes that.
        seconds = replay_seconds(each) if on_gpu and way in ("triton", "copy") else clock_seconds(each)
        yield Storing(way, tokens, seconds * 1e6, 2 * (k.nbytes + v.nbytes) / seconds / 1e9)


def _slots(tokens: int, pool: KVPool) -> Iterator[Tensor]:
    """Slots for `tokens` tokens, repeated until every page of the pool was used, or 2,048 times."""
    size = pool.layout.page_size
    rng = torch.Generator().manual_seed(0)
    pages = tokens if tokens <= DECODE else pool.layout.pages_for(tokens)
    for chosen in torch.split(torch.randperm(pool.num_pages, generator=rng)[: 2048 * pages], pages):
        if len(chosen) == pages:
            offsets = torch.randint(size, (pages, 1), generator=rng) if tokens <= DECODE else torch.arange(size)
            yield (chosen[:, None] * size + offsets).flatten()[:tokens].to(pool.device)


def reading(device: torch.device, page_size: int, tokens: int = SEQUENCE) -> Iterator[Reading]:
    """Time reading every head of K and V, piece by piece, into a buffer that stays in the cache.

    On a CPU, call it with one thread: it measures the access pattern, not the number of cores.
    """
    pages, heads, dim = tokens // page_size, LAYER.kv_heads, LAYER.head_dim
    part = pages // 16  # of a head, at a time
    buffer = torch.empty(part, page_size, dim, dtype=torch.bfloat16, device=device)
    tables = torch.split(torch.randperm(pages, generator=torch.Generator().manual_seed(0)).to(device), part)
    shapes = {"tokens_first": (pages, page_size, heads, dim), "heads_first": (pages, heads, page_size, dim)}
    shuffled: dict[str, float] = {}
    neighbours: dict[str, float] = {}
    for name, shape in shapes.items():
        kv = [torch.zeros(shape, dtype=buffer.dtype, device=device) for _ in range(2)]
        each = [head for side in kv for head in side.unbind(2 if name == "tokens_first" else 1)]
        by_table = [partial(torch.index_select, head, 0, table, out=buffer) for head in each for table in tables]
        in_a_run = [partial(buffer.copy_, run) for head in each for run in torch.split(head, part)]
        for rates, calls in ((shuffled, by_table), (neighbours, in_a_run)):
            seconds = replay_seconds(calls) if device.type == "cuda" else clock_seconds(calls)
            rates[name] = buffer.nbytes / seconds / 1e9
    yield Reading(page_size, "shuffled", **shuffled)
    yield Reading(page_size, "neighbours", **neighbours)


@contextmanager
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _table(names: Sequence[str], rows: Iterable[Sequence[object]]) -> Table:
    table = Table(header_style="dim", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in names:
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            *(f"{x:,.1f}" if isinstance(x, float) else f"{x:,}" if isinstance(x, int) else str(x) for x in row)
        )
    return table


def _show(console: Console, pages: list[Allocating], stores: list[Storing], reads: list[Reading]) -> None:
    console.print("Allocator: million pages allocated or freed a second; seven requests freed, seven allocated")
    console.print(_table(("pool", "pages each", "the oldest", "any"), (tuple(asdict(a).values()) for a in pages)))
    console.print(
        f"\nStore: one layer, {LAYER.kv_heads} heads of {LAYER.head_dim}, {LAYER.dtype}; µs, and GB/s read + written"
    )
    ways = list(dict.fromkeys(s.way for s in stores))
    names = ["tokens", *(f"{way}{unit}" for way in ways for unit in ("\nµs", "\nGB/s"))]
    rows = [
        (tokens, *(x for s in stores if s.tokens == tokens for x in (s.microseconds, s.gb_per_second)))
        for tokens in dict.fromkeys(s.tokens for s in stores)
    ]
    console.print(_table(names, rows))
    console.print(f"\nLayout: GB/s, K and V of {SEQUENCE:,} tokens read head by head")
    names = ["page", "pages", "tokens first", "heads first", "ratio"]
    console.print(_table(names, ((*asdict(r).values(), r.heads_first / r.tokens_first) for r in reads)))


def _figures(pages: list[Allocating], stores: list[Storing], reads: list[Reading]) -> dict[str, object]:
    return {
        "allocator": {f"pool_{a.pool}_pages_{a.pages_at_once}": asdict(a) for a in pages},
        "store": {f"{s.way}_{s.tokens}": asdict(s) for s in stores},
        "layout": {f"page_{r.page_size}_{r.pages}": asdict(r) for r in reads},
    }


def main(arguments: list[str] | None = None) -> int:
    gpu = torch.cuda.is_available()
    p = argparse.ArgumentParser(prog="python -m phase1_kv_pool.lab bench", description=__doc__)
    p.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if gpu else "cpu", help="(%(default)s)")
    p.add_argument("--json", type=Path, metavar="FILE", help="write the figures here")
    options = p.parse_args(arguments)
    device = torch.device(options.device)
    if options.device == "cuda" and not gpu:
        p.error(f"--device cuda was asked for, and torch {torch.__version__} sees no GPU here")
    console = Console()
    watch = partial(track, console=console, transient=True)
    pages = [allocating(pool, n) for pool in watch(POOLS, "allocator") for n in PAGES_AT_ONCE]
    num_pages = 16_384 if options.device == "cuda" else 4_096
    stores = [row for tokens in watch(TOKENS, "store") for row in storing(device, tokens, num_pages)]
    with one_thread():
        reads = [row for size in watch(PAGE_SIZES, "layout") for row in reading(device, size)]
    _show(console, pages, stores, reads)
    if options.json is not None:
        machine = describe()
        command = f"python -m phase1_kv_pool.lab bench --device {options.device}"
        computed = machine.gpu if options.device == "cuda" else machine.cpu
        record(options.json, command, _figures(pages, stores, reads), device=computed)
        console.print(f"\nFigures written to {options.json}")
    return 0

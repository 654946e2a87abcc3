"""`python -m phase1_kv_pool.lab bench`: the cost of allocating, writing and reading pages.

Allocator: pages allocated and freed a second, in a small pool and in a large one. Store: the bandwidth of each
implementation against a plain copy of the same bytes. Layout: reading a sequence head by head, with tokens before heads
and with heads before tokens.
"""

import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor

from phase0_request.lab.report import finish, parser, section
from phase1_kv_pool.allocator import PageAllocator
from phase1_kv_pool.lab.store import store_of
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
EVENTS = 100_000  # pages in a timed run
CALLS = 2048  # of a store, on different pages


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
    tokens_first: float  # [pages, page_size, kv_heads, head_dim]
    heads_first: float  # [pages, kv_heads, page_size, head_dim]


def allocating(pool: int, n: int) -> Allocating:
    """The best of five runs, each of EVENTS pages allocated and freed.

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
    groups = max(EVENTS // n // together, 1)
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
    kv = pool.layers[0]
    slots = list(_slots(tokens, pool))
    every = num_pages * LAYER.page_size // len(slots)

    def copy(place: int) -> None:
        kv.keys.view(-1, heads, dim)[place : place + tokens].copy_(k)
        kv.values.view(-1, heads, dim)[place : place + tokens].copy_(v)

    on_gpu = device.type == "cuda"
    calls: dict[str, Calls] = {
        way: [partial(store_of(way), kv, s, k, v) for s in slots]
        for way in ("reference", "cpu", *(["triton"] if on_gpu else []))
    }
    calls["copy"] = [partial(copy, i * every) for i in range(len(slots))]
    for way, each in calls.items():
        # On a GPU the first two synchronize to read the slots, which a CUDA graph forbids. Their time includes that.
        seconds = replay_seconds(each) if on_gpu and way in ("triton", "copy") else clock_seconds(each)
        yield Storing(way, tokens, seconds * 1e6, 2 * (k.nbytes + v.nbytes) / seconds / 1e9)


def _slots(tokens: int, pool: KVPool) -> Iterator[Tensor]:
    """Slots for `tokens` tokens, repeated until every page of the pool was used, or CALLS times."""
    size = pool.layout.page_size
    rng = torch.Generator().manual_seed(0)
    pages = tokens if tokens <= DECODE else pool.layout.pages_for(tokens)
    for chosen in torch.split(torch.randperm(pool.num_pages, generator=rng)[: CALLS * pages], pages):
        if len(chosen) == pages:
            offsets = torch.randint(size, (pages, 1), generator=rng) if tokens <= DECODE else torch.arange(size)
            yield (chosen[:, None] * size + offsets).flatten()[:tokens].to(pool.device)


def reading(device: torch.device, page_size: int, tokens: int = SEQUENCE) -> Reading:
    """Time reading every head of K and V through a page table, piece by piece, into a buffer that stays in the cache.

    On a CPU, call it with one thread: it measures the access pattern, not the number of cores.
    """
    pages, heads, dim = tokens // page_size, LAYER.kv_heads, LAYER.head_dim
    part = pages // 16  # of a head, at a time
    buffer = torch.empty(part, page_size, dim, dtype=torch.bfloat16, device=device)
    tables = torch.split(torch.randperm(pages, generator=torch.Generator().manual_seed(0)).to(device), part)
    shapes = {"tokens_first": (pages, page_size, heads, dim), "heads_first": (pages, heads, page_size, dim)}
    rates: dict[str, float] = {}
    for name, shape in shapes.items():
        kv = [torch.zeros(shape, dtype=buffer.dtype, device=device) for _ in range(2)]
        each = [head for side in kv for head in side.unbind(2 if name == "tokens_first" else 1)]
        calls = [partial(torch.index_select, head, 0, table, out=buffer) for head in each for table in tables]
        seconds = replay_seconds(calls) if device.type == "cuda" else clock_seconds(calls)
        rates[name] = buffer.nbytes / seconds / 1e9
    return Reading(page_size, **rates)


def main(arguments: list[str] | None = None) -> int:
    gpu = torch.cuda.is_available()
    p = parser("phase1_kv_pool.lab bench", __doc__)
    p.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if gpu else "cpu", help="(%(default)s)")
    options, console = p.parse_args(arguments), Console(highlight=False)
    device = torch.device(options.device)
    if options.device == "cuda" and not gpu:
        p.error(f"--device cuda was asked for, and torch {torch.__version__} sees no GPU here")
    watch = partial(track, console=console, transient=True)
    pages = [allocating(pool, n) for pool in watch(POOLS, "allocator") for n in PAGES_AT_ONCE]
    num_pages = 16_384 if options.device == "cuda" else 4_096
    stores = [row for tokens in watch(TOKENS, "store") for row in storing(device, tokens, num_pages)]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    reads = [reading(device, size) for size in watch(PAGE_SIZES, "layout")]
    torch.set_num_threads(threads)
    moved = "Allocator: million pages allocated or freed a second; seven requests freed, seven allocated"
    stored = f"Store: a layer of {LAYER.kv_heads} heads of {LAYER.head_dim}, {LAYER.dtype}; read + written"
    read = f"Layout: GB/s, K and V of {SEQUENCE:,} tokens read head by head"
    figures = {
        "allocator": section(console, moved, {f"pool_{a.pool}_pages_{a.pages_at_once}": a for a in pages}),
        "store": section(console, stored, {f"{s.way}_{s.tokens}": s for s in stores}),
        "layout": section(console, read, {f"page_{r.page_size}_shuffled": r for r in reads}),
    }
    finish(p, options, arguments, figures, gpu=options.device == "cuda")
    return 0

"""`python -m phase2_prefill_decode.lab ceilings`: the limits of this machine.

How fast it multiplies matrices, how fast it copies and reads memory that no cache holds, and what it costs to start an
operator that has nothing to do. The cost model's predictions stand on them.

On a CPU it also measures what the processor computes on numbers in registers, and how near the engine's kernels come to
that and to the reads: products of few rows and many with weights in each format, and the attention of decodes.

All cores take part. Memory may be shared with other programs, and with other machines on the same host, so it
is read again and again in between the other measurements. The roof is the best of these reads; the spread goes with it.
"""

import time
from collections.abc import Callable, Iterator
from functools import partial
from statistics import median
from typing import Any

import torch
from rich.console import Console
from torch.nn.functional import linear

from phase0_request.lab.report import finish, parser, table
from phase0_request.support.machine import cores
from phase1_kv_pool.lab.timing import Calls, clock_seconds, replay_seconds
from phase1_kv_pool.layer import KVLayer
from phase2_prefill_decode.connect import backend_for
from phase2_prefill_decode.extras.cpu.microkernel import SET
from phase2_prefill_decode.kernels.attention import AttentionMetadata
from phase2_prefill_decode.lab import rows
from phase2_prefill_decode.lab.peaks import peaks
from phase2_prefill_decode.lab.roofline import measured

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
SIZES = {"cpu": (1024, 2048, 3072), "cuda": (2048, 4096, 8192)}  # of square matrices
OUT_OF_CACHE = {"cpu": 256 << 20, "cuda": 1 << 30}  # bytes
WIDTH = 4096  # of the matrix in a matrix-vector product
CALLS = 500
READS = 15  # of all that memory, in each of three rounds
ROWS = 1, 8, 512  # of products
SEQUENCES, CONTEXT, KV_HEADS, GROUP, HEAD_DIM, PAGE = 8, 4096, 8, 2, 128, 16  # of decodes

Figures = dict[str, Any]


def measure(device: torch.device) -> Figures:
    """Measure every ceiling, and the best of each kind. Each is the best of several runs: the machine may be shared."""
    threads = torch.get_num_threads()
    torch.set_num_threads(cores())
    try:
        reads = _reads(device)
        products = {f"{dtype}_{size}": _product(device, dtype, size) for dtype in DTYPES for size in SIZES[device.type]}
        reads += _reads(device)
        memory = dict(_memory(device))
        reads += _reads(device)
    finally:
        torch.set_num_threads(threads)
    memory["sum"] = max(reads)
    best = {f"gflops_{dtype}": max(v for k, v in products.items() if k.startswith(dtype)) for dtype in DTYPES}
    best["copy_gb_per_second"] = memory["copy"]
    best["read_gb_per_second"] = max(rate for name, rate in memory.items() if name != "copy")
    best |= {f"{name}_us": seconds * 1e6 for name, seconds in _calls(device)}
    spread = {"least": min(reads), "median": median(reads), "most": max(reads), "reads": len(reads)}
    return {
        "matrix_product_gflops": products,
        "memory_gb_per_second": memory,
        "read_spread_gb_per_second": spread,
        "threads": cores(),
        "best": best,
    }


@torch.inference_mode()
def _reads(device: torch.device) -> list[float]:
    """GB/s of reading memory that no cache holds and writing nothing, of each of READS runs."""
    size, rates = OUT_OF_CACHE[device.type], []
    source = torch.ones(size // 4, device=device)
    source.sum().item()
    for _ in range(READS):
        start = time.perf_counter()
        source.sum().item()  # waits for the result
        rates.append(size / (time.perf_counter() - start) / 1e9)
    return rates


@torch.inference_mode()
def _product(device: torch.device, dtype: str, size: int) -> float:
    """GFLOP/s of a product of two square matrices, one of them a weight, as in a prefill."""
    x, weight = (torch.randn(size, size, device=device).to(DTYPES[dtype]) for _ in range(2))
    return 2 * size**3 / _seconds(device, [partial(backend_for(device).linear(weight, None), x)]) / 1e9


@torch.inference_mode()
def _memory(device: torch.device) -> Iterator[tuple[str, float]]:
    """GB/s, of bytes read and written, by operation. Of ones, because pages of fresh zeros may not be allocated."""
    size = OUT_OF_CACHE[device.type]
    source = torch.ones(size // 4, device=device)
    target = torch.empty_like(source)
    # A copy in a graph is a node of its own, which an H100 runs at 2.4 TB/s; kernels read and write at 3.0.
    copy = partial(torch.neg, source, out=target) if device.type == "cuda" else partial(target.copy_, source)
    yield "copy", 2 * size / _seconds(device, [copy]) / 1e9
    del source, target, copy
    for name, dtype in DTYPES.items():  # what decode does with every weight
        weight = torch.ones(size // dtype.itemsize // WIDTH, WIDTH, device=device, dtype=dtype)
        product = partial(backend_for(device).linear(weight, None), torch.ones(1, WIDTH, device=device, dtype=dtype))
        yield f"matrix_vector_{name}", size / _seconds(device, [product]) / 1e9


def measure_kernels() -> Figures:
    """What this CPU computes at most, and what the engine's kernels reach, on all cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(cores())
    try:
        return {"peak_gflops": peaks(), "kernels": dict(_kernels())}
    finally:
        torch.set_num_threads(threads)


@torch.inference_mode()
def _kernels() -> Iterator[tuple[str, Figures]]:
    """GFLOP/s and GB/s of the engine's kernels on this CPU."""

    def rates(call: Callable[[], object], operations: float, size: float) -> Figures:
        seconds = clock_seconds([call])
        return {"gflops": operations / seconds / 1e9, "gb_per_second": size / seconds / 1e9}

    backend = backend_for(torch.device("cpu"))
    for name, make in rows.WEIGHTS.items():
        weight = make()
        product, (outputs, inputs), size = backend.linear(weight, None), weight.shape, weight.nbytes
        del weight
        for count in ROWS:
            call = partial(product, torch.ones(count, inputs, dtype=torch.bfloat16))
            yield f"product_{name}_rows_{count}", rates(call, 2 * count * outputs * inputs, size)
    pages = CONTEXT // PAGE
    pool = torch.ones(2, SEQUENCES * pages, KV_HEADS, PAGE, HEAD_DIM, dtype=torch.bfloat16)
    table = torch.arange(SEQUENCES * pages, dtype=torch.int32).view(SEQUENCES, pages)
    lengths, ends = torch.full((SEQUENCES,), CONTEXT, dtype=torch.int32), torch.arange(SEQUENCES + 1).int()
    metadata = AttentionMetadata(ends, lengths, table, 1, CONTEXT)
    query = torch.ones(SEQUENCES, KV_HEADS * GROUP, HEAD_DIM, dtype=torch.bfloat16)
    call = partial(backend.attend, query, KVLayer(pool[0], pool[1]), metadata, HEAD_DIM**-0.5, None, None)
    yield f"attention_decode_{CONTEXT}", rates(call, 2 * GROUP * pool.numel(), pool.nbytes)


@torch.inference_mode()
def _calls(device: torch.device) -> Iterator[tuple[str, float]]:
    """Host seconds to start an operator on one number; on a GPU also a small product, a kernel of ours, and a graph."""
    number, row, weight = (torch.ones(shape, device=device) for shape in ((1,), (1, 128), (128, 128)))
    calls: dict[str, Callable[[], object]] = {"call": partial(number.add_, 1)}
    if device.type == "cuda":
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            number.add_(1)
        calls |= {"linear": partial(linear, row, weight), "launch": partial(backend_for(device).swiglu, row)}
        calls["replay"] = graph.replay
    for name, call in calls.items():
        yield name, clock_seconds([call] * CALLS)


def _seconds(device: torch.device, calls: Calls) -> float:
    return replay_seconds(calls) if device.type == "cuda" else clock_seconds(calls)


def print_kernels(console: Console, kernels: Figures, most: dict[str, float], reads: float) -> None:
    """Each kernel beside what the processor computes in its best dtype, and what memory reads."""
    peak = max(most.values())
    shares = [
        (name.replace("_", " "), own["gflops"], 100 * own["gflops"] / peak, own["gb_per_second"],
         100 * own["gb_per_second"] / reads)
        for name, own in kernels.items()
    ]  # fmt: skip
    console.print(table(("", "GFLOP/s", "% of peak", "GB/s", "% of reads"), shares, title=f"Kernels for {SET}"))
    peaks_in = ", ".join(f"{rate:,.0f} GFLOP/s in {dtype}" for dtype, rate in most.items())
    console.print(f"In registers the processor computes {peaks_in}; memory reads {reads:.1f} GB/s")


def main(arguments: list[str] | None = None) -> int:
    gpu = torch.cuda.is_available()
    p = parser("phase2_prefill_decode.lab ceilings", __doc__)
    p.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if gpu else "cpu", help="(%(default)s)")
    options, console = p.parse_args(arguments), Console(highlight=False)
    if options.device == "cuda" and not gpu:
        p.error(f"--device cuda was given, but torch {torch.__version__} sees no GPU here")
    with console.status("measuring"):
        figures = measure(torch.device(options.device))
        figures |= measure_kernels() if options.device == "cpu" else {}
    lines: list[tuple[str, float, str]] = [
        *((f"matrix product, {name}", rate, "GFLOP/s") for name, rate in figures["matrix_product_gflops"].items()),
        *((f"memory, {name}", rate, "GB/s") for name, rate in figures["memory_gb_per_second"].items()),
        *((f"reads, {name}", figures["read_spread_gb_per_second"][name], "GB/s") for name in ("least", "median")),
        *((f"host, {name[:-3]}", us, "\u00b5s") for name, us in figures["best"].items() if name.endswith("_us")),
    ]
    console.print(table(("", "best", ""), lines))
    if kernels := figures.get("kernels"):
        print_kernels(console, kernels, figures["peak_gflops"], figures["best"]["read_gb_per_second"])
    for dtype in DTYPES:
        ridge = measured({"device": options.device, "figures": figures}, dtype).ridge
        console.print(f"{dtype}: below {ridge:,.0f} operations a byte, memory is the roof")
    finish(p, options, arguments, figures, gpu=options.device == "cuda")
    return 0

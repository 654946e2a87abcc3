"""`python -m phase6_integration.lab host_time`: host time of launching a step, whole or in pieces, without a GPU.

The runner, the model's code and Triton's launches are those of a server, for a model with the layers and heads of the
named one and tiny widths. In the time: copying the lists of a step into one array, operators of torch, which run on the
CPU over few numbers, and all that Triton does in Python for a launch. Not in it: matrix products, which are counted and
neither computed nor launched; the call of CUDA at the end of each launch; pinned memory and the copy to the device;
planning, packing and committing, which `lab overlap` measures. So a step takes longer where there is a GPU. In a case
`_pieces`, what lies between two attentions is a graph: its launch is counted and takes no time. The clock counts the
processor time of the thread, which never waits: other programs on the machine count little.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor

from phase0_request.batch import Batch, Slice
from phase0_request.lab.metrics import percentile
from phase0_request.lab.report import finish, parser, table
from phase0_request.params import SamplingParams
from phase0_request.request import Request
from phase1_kv_pool.cache import PagedCache
from phase1_kv_pool.lab.no_device import LAUNCHES, use_no_device
from phase1_kv_pool.pool import KVPool
from phase2_prefill_decode.backend import triton_backend
from phase2_prefill_decode.extras.piecewise import record_pieces
from phase2_prefill_decode.lab.cost import CostModel
from phase2_prefill_decode.lab.roofline import named
from phase2_prefill_decode.linear import TorchLinear
from phase2_prefill_decode.model import Model, sampler_for
from phase2_prefill_decode.step.graphs import Computed, Replay
from phase2_prefill_decode.step.packed import PackedStep, join, split
from phase2_prefill_decode.step.runner import ModelRunner
from phase5_continuous.lab.simulator import MODELS
from phase5_continuous.lab.virtual import StepTimes
from phase6_integration.engine.gc_freeze import freeze

CONTEXT, CHUNK = 1500, 1793  # tokens
CASES = {  # new tokens and all tokens of each sequence
    "decode_1": ((1, CONTEXT),),
    "decode_256": ((1, CONTEXT),) * 256,
    "mixed": (*((1, CONTEXT),) * 255, (CHUNK, CHUNK)),
    "mixed_512": (*((1, CONTEXT),) * 15, (497, 497)),
}
GPU = "H200"
PAGE_SIZE = 16
TINY: dict[str, Any] = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 64, "max_position_embeddings": 4096, "dtype": "bfloat16",
}  # fmt: skip


class NoProduct(TorchLinear):
    """In place of a linear layer: counts its calls, and returns rows that nothing has computed."""

    kernel = "none"

    def __init__(self, weight: Any, bias: Tensor | None = None) -> None:
        super().__init__(weight, bias)
        self._result: Tensor = weight.new_zeros(256 + CHUNK, len(weight))

    def __call__(self, rows: Tensor, out: Tensor | None = None) -> Tensor:
        LAUNCHES["GEMM"] += 1
        return self._result[: len(rows)]


class OneArrayRunner(ModelRunner):
    """Brings the arrays of a step in one array, as for a GPU."""

    def forward(self, step: PackedStep) -> Computed:
        arrays = step.arrays
        return self.compute(step, split(join(arrays), arrays))


@dataclass(slots=True)
class Case:
    """A step of one model, launched again and again."""

    launch: Callable[[], object]
    device_ms: float  # at least, by the cost model


def cases_of(name: str, layers: int | None) -> Iterator[tuple[str, Case]]:
    """The steps of a model, ready to launch. `layers` replaces its number of layers."""
    shape = replace(MODELS[name], **TINY)
    if layers is not None:
        shape = replace(shape, num_hidden_layers=layers, layers=())
    times = StepTimes(CostModel(MODELS[name]), named(GPU))
    model = Model.random(shape, device="cpu", backend=replace(triton_backend(), linear=NoProduct))
    pool = KVPool(shape.kv_layout(PAGE_SIZE), 4, "cpu", torch.bfloat16)  # never read
    for case, lengths in CASES.items():
        cache = PagedCache(sum(-(-length // PAGE_SIZE) for _, length in lengths), PAGE_SIZE)
        slices = []
        for number, (new, length) in enumerate(lengths):
            request = Request(f"{number}", (0,) * length, SamplingParams(temperature=0))
            cache.attach(request)
            cache.grow(request, length)
            slices.append(Slice(request, length - new, new))
        batch = Batch(tuple(slices))
        runner = OneArrayRunner(model.decoder, pool, cache, sampler_for(model, 0))
        runner.launch(runner.pack(batch))  # compiles kernels, and brings the page tables
        packed = runner.pack(batch)
        device_ms = times.seconds(times.load([piece[1:3] for piece in slices], len(slices))) * 1e3
        yield case, Case(partial(runner.launch, packed), device_ms)
        tokens = len(packed.tokens)
        if packed.max_seqlen_q > 1:
            recorded = OneArrayRunner(model.decoder, pool, cache, sampler_for(model, 0), runner.state)
            record_pieces(recorded, [tokens], shape.max_position_embeddings, record)
            yield f"{case}_pieces", Case(partial(recorded.launch, packed), device_ms)


def record(run: Replay) -> Replay:
    """In place of a CUDA graph: counts its launches."""
    result = run()

    def replay() -> Computed:
        LAUNCHES["graph"] += 1
        return result

    return replay


@contextmanager
def timed_launches() -> Iterator[list[float]]:
    """Seconds of each `kernel[grid](...)`: without what a wrapper does before it, such as allocating the result."""
    from phase1_kv_pool.kernels.triton.launch import LaunchedFunction

    run: Any = LaunchedFunction.run
    seconds = list[float]()

    def timed(self: Any, *args: Any, **options: Any) -> Any:
        start = time.thread_time()
        result = run(self, *args, **options)
        seconds.append(time.thread_time() - start)
        return result

    with patch.object(LaunchedFunction, "run", timed):
        yield seconds


def measure(cases: Mapping[str, Case], rounds: int, console: Console) -> dict[str, Any]:
    """The figures of each case. The cases take turns, so that a slow moment of the machine meets all of them."""
    times: dict[str, list[float]] = {name: [] for name in cases}
    for _ in track(range(rounds), "steps", console=console, transient=True):
        for name, case in cases.items():
            start = time.thread_time()
            case.launch()
            times[name].append((time.thread_time() - start) * 1e3)
    figures = {}
    for name, case in cases.items():
        with timed_launches() as seconds:
            for _ in range(rounds):
                LAUNCHES.clear()
                case.launch()
        launches = dict(LAUNCHES)
        figures[name] = {
            "launches": launches,
            "launches_of_triton": sum(launches.values()) - launches["GEMM"] - launches.get("graph", 0),
            "host_ms": spread(times[name]),
            "launch_us": spread([1e6 * launch for launch in seconds]),
            "device_ms": case.device_ms,
        }
    return figures


def spread(values: list[float]) -> dict[str, float]:
    return {"best": min(values), "median": median(values), "p90": percentile(values, 90)}


def main(arguments: list[str] | None = None) -> int:
    p = parser("phase6_integration.lab host_time", __doc__)
    p.add_argument("--models", nargs="+", choices=MODELS, default=["8b", "596m"], help="layers and heads (8b 596m)")
    p.add_argument("--layers", type=int, help="in place of the model's own")
    p.add_argument("--rounds", type=int, default=40, help="steps of each kind (%(default)s)")
    options = p.parse_args(arguments)
    use_no_device()
    torch.set_num_threads(1)  # the host launches from one thread
    console = Console()
    with console.status("compiling kernels"):
        cases = {f"{model}_{name}": case for model in options.models for name, case in cases_of(model, options.layers)}
    freeze()  # as the engine's process does
    figures = measure(cases, options.rounds, console)
    rows = [
        (name, row["launches_of_triton"], row["launches"]["GEMM"], row["launches"].get("graph", 0),
         *row["host_ms"].values(), row["launch_us"]["median"], row["device_ms"])
        for name, row in figures.items()
    ]  # fmt: skip
    names = ("step", "launches", "GEMMs", "graphs", "ms best", "median", "p90", "us a launch", GPU)
    console.print(table(names, rows, digits=2))
    console.print(f"Times in ms, a launch of Triton in us. {GPU}: the least time of the device, by the cost model.")
    finish(p, options, arguments, figures)
    return 0

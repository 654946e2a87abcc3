"""`python -m phase6_integration.lab tensor_parallel`: what a model costs over several ranks, on the cores of a CPU.

For each number of ranks: the memory that the model adds to each rank's process, and the time of steps, split into what
rank 0 computes and what it spends in collectives, where it also waits for the slowest rank. A rank has one thread.
"""

import gc
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console

from phase0_request.batch import Batch, Slice
from phase0_request.lab.report import finish, parser, section
from phase0_request.request import Request
from phase0_request.support.machine import give_back_freed_memory
from phase0_request.tokenizer import BUNDLED
from phase1_kv_pool.cache import PagedCache
from phase2_prefill_decode.connect import runner_for
from phase2_prefill_decode.extras.cpu.product import PackedWeight
from phase2_prefill_decode.extras.linears import every_product
from phase2_prefill_decode.extras.parallel.layers import ParallelDecoder
from phase2_prefill_decode.extras.parallel.load import load_split
from phase2_prefill_decode.extras.parallel.ranks import Ranks
from phase2_prefill_decode.lab.random_weights import save_random
from phase2_prefill_decode.model import Model, sampler_for

RANKS = {"bundled": (1, 2, 4), "17m": (1, 2)}  # 17m has six heads, which four ranks cannot share
PROMPT, CONTEXT, BATCHES, STEPS = 256, 128, (1, 16), 20  # tokens, tokens, requests of a decode step, steps
PAGE = 16
MB = 1e6


class Collectives:
    """The seconds that rank 0 has spent in collectives, and how many there were."""

    def __init__(self, model: Model) -> None:
        self.seconds, self.count = 0.0, 0
        if isinstance(model.decoder, ParallelDecoder):
            group = model.decoder.group
            for name in ("all_reduce", "broadcast", "gather"):
                setattr(group, name, self._timed(getattr(group, name)))

    def _timed(self, collective: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def timed(tensor: Any) -> Any:
            start = time.perf_counter()
            result = collective(tensor)
            self.seconds += time.perf_counter() - start
            self.count += 1
            return result

        return timed


class Steps:
    """Steps of a model, without an engine."""

    def __init__(self, model: Model) -> None:
        self.cache = PagedCache(-(-CONTEXT // PAGE) * (max(BATCHES) + 2) + PROMPT // PAGE, PAGE)
        self.runner = runner_for(model.decoder, self.cache, sampler_for(model, 0))
        self.collectives = Collectives(model)

    def measure(self, requests: int, length: int, new: int) -> dict[str, float]:
        """The median of STEPS steps of some requests of `length` tokens, of which the last `new` ones are computed."""
        each = [Request(f"{number}", tuple(i % 50 for i in range(length))) for number in range(requests)]
        for request in each:
            self.cache.attach(request)
            self.cache.grow(request, length)
        batch = Batch(tuple(Slice(request, length - new, new) for request in each))
        totals, inside, count = [], [], 0
        for _ in range(STEPS):
            self.collectives.seconds, self.collectives.count = 0.0, 0
            start = time.perf_counter()
            self.runner.run(self.runner.pack(batch))
            totals.append(time.perf_counter() - start)
            inside.append(self.collectives.seconds)
            count = self.collectives.count
        for request in each:
            self.cache.release(request)
        step, collectives = 1e3 * median(totals), 1e3 * median(inside)
        return {"step_ms": step, "collectives_ms": collectives, "compute_ms": step - collectives, "collectives": count}


@contextmanager
def loaded(directory: Path, ranks: int) -> Iterator[Model]:
    load = Model.load if ranks == 1 else partial(load_split, size=ranks)
    model = load(directory, device="cpu", dtype="bfloat16")
    try:
        yield model
    finally:
        if model.decoder.processes is not None:
            model.decoder.processes.close()


def memory_of(model: Model) -> list[int]:
    """The bytes that the process of each rank has written."""
    gc.collect()
    give_back_freed_memory()
    ranks = model.decoder.processes
    pids = ["self", *(ranks.pids if isinstance(ranks, Ranks) else ())]
    return [anonymous_bytes(f"/proc/{pid}/status") for pid in pids]


def anonymous_bytes(status: str) -> int:
    (line,) = (line for line in Path(status).read_text().splitlines() if line.startswith("RssAnon:"))
    return int(line.split()[1]) * 1024


def measure(directory: Path, ranks: int) -> dict[str, Any]:
    with loaded(BUNDLED, ranks) as small:  # the interpreter, torch and kernels are in memory, and this model
        others = memory_of(small)[1:]
        held = weight_bytes(small)
    gc.collect()
    give_back_freed_memory()
    own = anonymous_bytes("/proc/self/status")
    with loaded(directory, ranks) as model:
        memory = memory_of(model)
        added = [memory[0] - own, *(after - before + held for after, before in zip(memory[1:], others, strict=True))]
        steps = Steps(model)
        figures: dict[str, Any] = {"weights_mb": weight_bytes(model) / MB, "most_added_mb": max(added) / MB}
        figures["added_mb"] = {f"rank_{rank}": size / MB for rank, size in enumerate(added)}
        for requests in BATCHES:
            figures[f"decode_{requests}"] = steps.measure(requests, CONTEXT, 1)
        figures[f"prefill_{PROMPT}"] = steps.measure(1, PROMPT, PROMPT)
    return figures


def weight_bytes(model: Model) -> int:
    """The bytes of rank 0's matrices, packed."""
    decoder = model.decoder
    packed = [each for each in every_product(decoder) if isinstance(each, PackedWeight)]
    return sum(blocks.tensor.nbytes for each in packed for blocks in each._blocks)


def main(arguments: list[str] | None = None) -> int:
    p = parser("phase6_integration.lab tensor_parallel", __doc__)
    p.add_argument("--models", nargs="+", choices=tuple(RANKS), default=["bundled", "17m"], metavar="MODEL")
    p.add_argument("--ranks", nargs="+", type=int, default=[1, 2, 4], metavar="N")
    options = p.parse_args(arguments)
    torch.set_num_threads(1)
    console, figures = Console(), dict[str, Any]()
    for name in options.models:
        with tempfile.TemporaryDirectory() as folder:
            directory = BUNDLED if name == "bundled" else Path(folder)
            if name != "bundled":
                save_random(name, directory)
            of_model = {f"ranks_{n}": measure(directory, n) for n in RANKS[name] if n in options.ranks}
        figures[name] = of_model
        for kind in (*(f"decode_{requests}" for requests in BATCHES), f"prefill_{PROMPT}"):
            rows = {ranks: {"added_mb": row["most_added_mb"], **row[kind]} for ranks, row in of_model.items()}
            section(console, f"{name}, {kind.replace('_', ' of ')}", rows, 2)
    finish(p, options, arguments, figures)
    return 0

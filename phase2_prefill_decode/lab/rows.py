"""`python -m phase2_prefill_decode.lab rows`: the time of one product, by the format of its weight and its rows.

The weight is in no cache. With few rows its bytes decide, with many the arithmetic: the line between them is the
machine's own. One thread by default: beside other programs, several would wait for each other.
"""

from collections.abc import Callable
from functools import partial
from itertools import product
from math import inf
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from phase0_request.lab.report import finish, parser, table
from phase1_kv_pool.lab.timing import clock_seconds
from phase1_kv_pool.memory import allocate
from phase2_prefill_decode.connect import backend_for
from phase2_prefill_decode.extras.quantized.quantize import GROUP
from phase2_prefill_decode.extras.quantized.weight import QuantizedWeight
from phase2_prefill_decode.linear import Linear

OUTPUTS, INPUTS = 49_152, 2048
ROWS = 1, 2, 4, 8, 16, 32, 64, 128


def integers(bits: int, groups: int) -> QuantizedWeight:
    """Any numbers: the time does not depend on them."""
    stored = (0, 256, (OUTPUTS, INPUTS // 2), torch.uint8) if bits == 4 else (-127, 128, (OUTPUTS, INPUTS), torch.int8)
    low, high, shape, dtype = stored
    values = torch.randint(low, high, shape, dtype=dtype)
    return QuantizedWeight(values=values, scales=torch.full((OUTPUTS, groups), 0.01, dtype=torch.bfloat16))


def floats8() -> QuantizedWeight:
    plain = integers(8, 1)
    values = (plain.values.float() / 8).to(torch.float8_e4m3fn)
    return QuantizedWeight(values=values, scales=plain.scales)


def bfloat16() -> Tensor:
    return torch.full((OUTPUTS, INPUTS), 0.01, dtype=torch.bfloat16)


WEIGHTS: dict[str, Callable[[], Tensor | QuantizedWeight]] = {
    "bfloat16": bfloat16,
    "int8": partial(integers, 8, 1),
    "fp8": floats8,
    "int4": lambda: integers(4, INPUTS // GROUP),
}


@torch.inference_mode()
def measure(rounds: int = 1) -> dict[str, Any]:
    """The best of some rounds, each of every format and number of rows: other programs only ever slow one down."""
    figures: dict[str, Any] = {}
    products: dict[str, Linear] = {}
    for name, make in WEIGHTS.items():
        weight = make()
        products[name] = backend_for(torch.device("cpu")).linear(weight, None)
        figures[name] = {"megabytes": weight.nbytes / 1e6, "kernel": products[name].kernel}
    some = {rows: torch.ones(rows, INPUTS, dtype=torch.bfloat16) for rows in ROWS}
    memory, best = allocate(OUTPUTS * INPUTS * 2).view(torch.float32), dict.fromkeys(product(WEIGHTS, ROWS), inf)
    reading = inf
    memory.fill_(1)
    for _ in range(rounds):
        reading = min(reading, clock_seconds([memory.sum]))
        for name, rows in best:
            best[name, rows] = min(best[name, rows], clock_seconds([partial(products[name], some[rows])]))
    for (name, rows), seconds in best.items():
        size, operations = figures[name]["megabytes"] * 1e6, 2 * rows * OUTPUTS * INPUTS
        rates = {"gb_per_second": size / seconds / 1e9, "gflops": operations / seconds / 1e9}
        figures[name][f"rows_{rows}"] = {"ms": seconds * 1e3, **rates}
    return {"read_gb_per_second": memory.nbytes / reading / 1e9, **figures}


def main(arguments: list[str] | None = None) -> int:
    p = parser("phase2_prefill_decode.lab rows", __doc__)
    p.add_argument("--rounds", type=int, default=10, help="of which the best is taken (%(default)s)")
    p.add_argument("--threads", type=int, default=1, help="of a product (%(default)s)")
    options, console = p.parse_args(arguments), Console(highlight=False)
    torch.set_num_threads(options.threads)
    with console.status("measuring"):
        figures = measure(options.rounds)
    console.print(f"{OUTPUTS} x {INPUTS}, {figures['bfloat16']['kernel']}, {torch.get_num_threads()} threads")
    console.print(f"A sum reads memory at {figures['read_gb_per_second']:.1f} GB/s")
    for unit in ("ms", "gb_per_second", "gflops"):
        shown = [(name, *(figures[name][f"rows_{rows}"][unit] for rows in ROWS)) for name in WEIGHTS]
        console.print(table((unit.replace("_per_", "/").replace("_", " "), *map(str, ROWS)), shown))
    finish(p, options, ["--rounds", f"{options.rounds}", "--threads", f"{options.threads}"], figures)
    return 0

"""`python -m phase2_prefill_decode.lab rows`: the time of one product, by the format of its weight and its rows.

The weight is in no cache. With few rows its bytes decide, with many the arithmetic: the line between them is the
machine's own.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from phase0_request.lab.report import finish, parser, table
from phase1_kv_pool.lab.timing import clock_seconds
from phase2_prefill_decode.linear import Linear
from phase2_prefill_decode.loading.quantized.quantize import GROUP
from phase2_prefill_decode.loading.quantized.weight import QuantizedWeight

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
    values = (plain.values % 120).view(torch.float8_e4m3fn)
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
def measure() -> dict[str, Any]:
    figures: dict[str, Any] = {}
    for name, make in WEIGHTS.items():
        weight = make()
        product, size = Linear(weight), weight.nbytes
        if isinstance(weight, Tensor):
            figures["read_gb_per_second"] = size / clock_seconds([torch.ones(size // 4).sum]) / 1e9
        row: dict[str, Any] = {"megabytes": size / 1e6, "kernel": product.kernel}
        del weight
        for rows in ROWS:
            seconds = clock_seconds([partial(product, torch.ones(rows, INPUTS, dtype=torch.bfloat16))])
            gflops = 2 * rows * OUTPUTS * INPUTS / seconds / 1e9
            row[f"rows_{rows}"] = {"ms": seconds * 1e3, "gb_per_second": size / seconds / 1e9, "gflops": gflops}
        figures[name] = row
    return figures


def main(arguments: list[str] | None = None) -> int:
    p = parser("phase2_prefill_decode.lab rows", __doc__)
    options, console = p.parse_args(arguments), Console(highlight=False)
    with console.status("measuring"):
        figures = measure()
    console.print(f"{OUTPUTS} x {INPUTS}, {figures['bfloat16']['kernel']}, {torch.get_num_threads()} threads")
    console.print(f"Memory reads at {figures['read_gb_per_second']:.1f} GB/s")
    for unit in ("ms", "gb_per_second", "gflops"):
        shown = [(name, *(figures[name][f"rows_{rows}"][unit] for rows in ROWS)) for name in WEIGHTS]
        console.print(table((unit.replace("_per_", "/").replace("_", " "), *map(str, ROWS)), shown))
    finish(p, options, arguments, figures)
    return 0

"""`python -m phase2_prefill_decode.lab cpu.products`: the engine's matrix product on a CPU beside oneDNN's.

A row's product here does not depend on its neighbours, so its sums have one order whatever the number of rows. oneDNN
is free to choose another way for each number of rows. The ratio of the two is what the order costs. Both are shown as
shares of the processor's peak; the share of numbers in 8 and 4 bits is of the peak in bfloat16.

Copies of a weight take turns, together 64 MiB in bfloat16: what a processor with a larger cache holds, it does not read
from memory.
"""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from phase0_request.lab.report import finish, parser, table
from phase0_request.support.machine import cores
from phase1_kv_pool.lab.timing import clock_seconds
from phase2_prefill_decode.connect import backend_for
from phase2_prefill_decode.extras.cpu.microkernel import SET
from phase2_prefill_decode.extras.quantized.quantize import quantize
from phase2_prefill_decode.lab.peaks import peaks
from phase2_prefill_decode.linear import Linear

SHAPES = (3072, 1024), (2304, 384)  # of one matrix each of the models of 596M and 17M
ROWS = 1, 4, 16, 64, 128, 512
BYTES = 64 << 20  # of all copies of a weight
FORMATS = "bfloat16", "float32", "int8", "fp8", "int4"
Calls = list[Callable[[Tensor], object]]


def ours(weight: Tensor, name: str) -> Linear:
    """The engine's product with a weight in a format."""
    stored = weight.to(getattr(torch, name)) if name in ("bfloat16", "float32") else quantize(weight.bfloat16(), name)
    return backend_for(torch.device("cpu")).linear(stored, None)


def onednn(weight: Tensor, rows: int) -> Callable[[Tensor], object] | None:
    """oneDNN's product with a weight that it has packed for this many rows. None if it does not pack a weight of this
    dtype for this processor: in bfloat16, without AVX-512."""
    ops = torch.ops.mkldnn
    try:
        packed = ops._reorder_linear_weight(weight, rows)
    except RuntimeError:
        return None
    return lambda x: ops._linear_pointwise(x, packed, None, "none", [], "")


def rate(calls: Calls, x: Tensor, operations: int, rounds: int) -> float:
    """GFLOP/s, of the best of some rounds of all calls in turn."""
    best = min(clock_seconds([partial(call, x) for call in calls]) for _ in range(rounds))
    return operations / best / 1e9


@torch.inference_mode()
def measure(rounds: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """The rates of each number of threads, shape and format, by the number of rows."""
    for (which, threads), (outputs, inputs) in product((("one_thread", 1), ("all_threads", cores())), SHAPES):
        torch.set_num_threads(threads)
        most = peaks()
        for name in FORMATS:
            weight, figures = torch.randn(outputs, inputs) / 30, dict[str, Any]()
            plain = name in ("bfloat16", "float32")
            dtype = torch.float32 if name == "float32" else torch.bfloat16
            peak = most["float32"] if name == "float32" else most.get("bfloat16", most["float32"])
            copies = max(BYTES // (weight.nbytes // 2), 1)
            own: Calls = [ours(weight, name) for _ in range(copies)]
            for rows in ROWS:
                x, operations = torch.randn(rows, inputs).to(dtype), 2 * rows * outputs * inputs
                found = {"gflops": rate(own, x, operations, rounds)}
                others = [one for _ in range(copies if plain else 0) if (one := onednn(weight.to(dtype), rows))]
                if others:
                    found["onednn_gflops"] = rate(others, x, operations, rounds)
                    found["over_onednn"] = found["gflops"] / found["onednn_gflops"]
                    found["onednn_share"] = found["onednn_gflops"] / peak
                figures[f"rows_{rows}"] = found | {"share": found["gflops"] / peak}
            yield f"{which}.{outputs}x{inputs}.{name}", figures | {"peak_gflops": peak}


def main(arguments: list[str] | None = None) -> int:
    p = parser("phase2_prefill_decode.lab cpu.products", __doc__)
    p.add_argument("--rounds", type=int, default=5, help="of which the best is taken (%(default)s)")
    options, console = p.parse_args(arguments), Console(highlight=False)
    before, figures, shown = torch.get_num_threads(), dict[str, Any](), []
    try:
        with console.status("measuring") as status:
            for name, found in measure(options.rounds):
                status.update(name)
                threads, shape, format = name.split(".")
                figures.setdefault(threads, {}).setdefault(shape, {})[format] = found
                rates = [found[f"rows_{rows}"] for rows in ROWS]
                shown.append((name, *(f"{each['share']:.0%}" for each in rates)))
                if "over_onednn" in rates[0]:
                    shown.append(("  oneDNN", *(f"{each['onednn_share']:.0%}" for each in rates)))
    finally:
        torch.set_num_threads(before)
    console.print(table((f"{SET}: share of the peak", *(f"{rows} rows" for rows in ROWS)), shown))
    finish(p, options, arguments, figures)
    return 0

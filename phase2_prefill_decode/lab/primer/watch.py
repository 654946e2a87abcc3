"""`python -m phase2_prefill_decode.lab primer.watch`: what each program of the first kernel computes."""

import argparse
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch

from phase1_kv_pool.kernels import prepare_triton


def watch(launch: Callable[[], object]) -> list[dict[str, Any]]:
    """Run a launch in Triton's interpreter. Returns the variables of each program as they are when it ends: numpy
    arrays of what the kernel computes. Pointers are addresses, in bytes."""
    import triton.language as tl

    programs: list[dict[str, Any]] = []

    def returned(frame: FrameType, event: str, _: object) -> None:
        caller = frame.f_back
        if event == "return" and caller is not None and caller.f_code.co_qualname == "GridExecutor.__call__":
            blocks = {name: value for name, value in frame.f_locals.items() if isinstance(value, tl.tensor)}
            if "self" not in frame.f_locals and blocks:
                programs.append({name: value.handle.data for name, value in blocks.items()})

    before = sys.getprofile()
    sys.setprofile(returned)
    try:
        launch()
    finally:
        sys.setprofile(before)
    return programs


def main(arguments: list[str] | None = None) -> int:
    p = argparse.ArgumentParser(
        prog="python -m phase2_prefill_decode.lab primer.watch",
        description="Interpret y = x * factor, and print the variables of each program.",
    )
    p.add_argument("--length", type=int, default=10, help="numbers in x (10)")
    p.add_argument("--block", type=int, default=4, help="numbers of a program: a power of two (4)")
    options = p.parse_args(arguments)
    if options.block < 1 or options.block & options.block - 1:
        p.error(f"a block has a power of two numbers, got {options.block}")
    if not prepare_triton():
        p.error("a GPU compiles the kernel, and shows no variables: set TRITON_INTERPRET=1")
    from phase2_prefill_decode.lab.primer import puzzles

    x = torch.arange(1.0, options.length + 1)
    for number, program in enumerate(watch(lambda: puzzles.scale(x, 10.0, options.block))):
        print(f"program {number}")
        for name in ("at", "mask", "numbers"):
            print(f"  {name:8} {' '.join(f'{value:5g}' for value in program[name])}")
    print(f"y: {puzzles.scale(x, 10.0, options.block).tolist()}")
    return 0

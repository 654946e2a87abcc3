"""`python -m phase2_prefill_decode.lab primer.read`: what Triton's compiler makes of the primer's kernels."""

import argparse
import re
from collections.abc import Callable
from dataclasses import replace
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import torch

from phase1_kv_pool.lab.ahead import ARCHITECTURES, Variant, compile_ahead, compile_all, launched
from phase1_kv_pool.lab.no_device import use_no_device

STAGES = "ttir", "ttgir", "llir", "ptx"  # what the compiler goes through, in order


def launches(puzzles: Any) -> dict[str, Callable[[], object]]:
    """A launch of each kernel of the module, in bfloat16; `splits` launches two."""
    x = torch.zeros(64, 64, dtype=torch.bfloat16)
    pages, table = x.view(8, 8, 64), torch.zeros(8, dtype=torch.int64)
    return {
        "scale": lambda: puzzles.scale(x[0], 2.0, 64),
        "copy": lambda: puzzles.copy(x[0], 64),
        "masked_copy": lambda: puzzles.masked_copy(x),
        "gather": lambda: puzzles.gather(pages, table, 50),
        "softmax": lambda: puzzles.softmax(x),
        "online": lambda: puzzles.online(x, x[0]),
        "attention": lambda: puzzles.attention(x[:16], x, x, 1.0),
        "paged": lambda: puzzles.paged(x[:16], pages, pages, table, 50, 1.0),
        "splits": lambda: puzzles.in_splits(x[:16], pages, pages, table, 50, 1.0, 32),
    }


def load(file: Path | None) -> Any:
    """The module of the kernels, or another file as a module, such as the workspace's."""
    if file is None:
        from phase2_prefill_decode.lab.primer import puzzles

        return puzzles
    spec = spec_from_file_location("puzzles", file)
    if spec is None or spec.loader is None or not file.is_file():
        raise FileNotFoundError(f"{file} is not a Python file")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main(arguments: list[str] | None = None) -> int:
    p = argparse.ArgumentParser(
        prog="python -m phase2_prefill_decode.lab primer.read",
        description="Compile a kernel of puzzles.py ahead of time, and show what it takes of a GPU.",
    )
    known = tuple(launches(None))
    p.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(known)} (all)")
    p.add_argument("--file", type=Path, help="with your kernels: workspace/phase2_prefill_decode/lab/primer/puzzles.py")
    p.add_argument(
        "--sm", type=int, choices=ARCHITECTURES, default=90, help="the GPU: 80 Ampere, 90 Hopper (default)..."
    )
    p.add_argument("--stage", choices=STAGES, help="print the kernel as it is after this stage of the compiler")
    options = p.parse_args(arguments)
    names = options.names or known
    if wrong := sorted({*names} - {*known}):
        p.error(f"there is no kernel {', '.join(wrong)}; the kernels are: {', '.join(known)}")
    use_no_device()  # before the kernels are defined
    try:
        puzzles = load(options.file)
    except FileNotFoundError as error:
        p.error(str(error))
    from triton.compiler.errors import CompilationError

    found: list[Variant] = [each for name in names for each in launched("", launches(puzzles)[name])]
    variants = [replace(variant, architectures=(options.sm,)) for variant in found]
    try:
        compiled = compile_all(variants)
    except CompilationError as error:
        while isinstance(error.__cause__, CompilationError):  # from the kernel to the function that it calls
            error = error.__cause__
        print(f"this does not compile for sm_{options.sm}: {error}")
        return 1
    for variant, kernel in zip(variants, compiled, strict=True):
        if options.stage:
            text = compile_ahead(variant, options.sm).asm[options.stage]
            print(re.sub(r"^#loc.*\n|\s*loc\(#?\w*\)| loc\(\"[^\n]*?\)\)", "", text, flags=re.MULTILINE).strip())
        print(
            f"{kernel.kernel.strip()} for sm_{options.sm}: {kernel.registers} registers per thread, "
            f"{kernel.stack} bytes of stack, {kernel.shared:,} bytes of shared memory, "
            f"{kernel.tensor_cores} tensor core instructions"
        )
    return 0

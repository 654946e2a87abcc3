"""Report of a lab's compiled kernels: as a table, as JSON, and for tests.

A lab needs a module `catalog`, with functions `catalog` and `everything` that yield Variants, and a module `kernels`,
where `main` calls `main("phaseN_x.lab", arguments)`.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from importlib import import_module
from itertools import dropwhile, groupby

from rich.console import Console
from rich.table import Table
from rich.text import Text

from phase0_request.support import entry
from phase1_kv_pool.lab.ahead import INSTRUCTIONS, Compiled, Variant, compile_all
from phase1_kv_pool.lab.no_device import use_no_device


def main(package: str, arguments: Sequence[str] | None = None) -> int:
    """Compile all kernels of a catalog and print the report. Returns 1 if a kernel is not as expected, 0 for JSON."""
    p = argparse.ArgumentParser(
        prog=f"python -m {package} kernels",
        description="Compile the kernels ahead of time, without a GPU, and show registers, stack and instructions.",
    )
    p.add_argument("names", nargs="*", metavar="NAME", help="only the kernels whose names begin so: decode, say")
    p.add_argument("--all", action="store_true", help="every combination of shapes and types; takes many minutes")
    p.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = p.parse_args(arguments)
    use_no_device()  # before the catalog is imported, which defines the kernels
    os.environ["TRITON_DISABLE_LINE_INFO"] = "1"  # not shown here, and a seventh of the time
    catalog = import_module(f"{package}.catalog")
    known: dict[str, Variant] = {}
    for variant in catalog.everything() if options.all else catalog.catalog():
        other = known.setdefault(variant.key, variant).architectures
        known[variant.key] = replace(known[variant.key], architectures=tuple(sorted({*variant.architectures, *other})))
    names = [variant.name for variant in known.values()]
    chosen = [variant for variant in known.values() if variant.name.startswith(tuple(options.names or [""]))]
    if not chosen:
        p.error(f"no kernel's name begins so; the names are: {'; '.join(names)}")
    kernels = compile_all(chosen)
    if options.json:
        print(json.dumps([asdict(kernel) for kernel in kernels]))
        return 0
    console = Console()
    console.print(table(kernels, narrow=console.width < 100))
    return 1 if any(kernel.faults for kernel in kernels) else 0


def compiled(package: str, *options: str) -> list[Compiled]:
    """The result of `python -m package kernels --json`, in a subprocess: here kernels may be interpreted."""
    command = [sys.executable, "-m", package, "kernels", "--json", *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=entry.environment())
    if done.returncode != 0:
        raise RuntimeError(f"python -m {package} kernels --json failed with {done.returncode}:\n{_error(done.stderr)}")
    return [Compiled(**{**kernel, "faults": tuple(kernel["faults"])}) for kernel in json.loads(done.stdout)]


def _error(text: str) -> str:
    """The error at the end of a traceback, without its frames. Of Triton's, the last lines: they show the place."""
    last = text.rpartition("Traceback (most recent call last):\n")[2].splitlines()
    return "\n".join([*dropwhile(lambda line: line.startswith(" "), last)][-11:])


def table(kernels: Sequence[Compiled], narrow: bool = False) -> Table:
    """A row for each kernel and each set of architectures with equal results. If `narrow`, names take two lines."""
    shown = Table(header_style="dim", box=None, pad_edge=False, padding=(0, 1, 0, 0))
    shown.add_column("\nkernel")
    shown.add_column("\nsm_", no_wrap=True)
    for name in ("\nregs", "\nstack", "shared\nKiB", *(name.replace("_", "\n") for name in INSTRUCTIONS), "\nok"):
        shown.add_column(name, justify="right", no_wrap=True)
    for alike, group in groupby(kernels, key=lambda kernel: replace(kernel, architecture=0)):
        architectures = " ".join(str(kernel.architecture) for kernel in group)
        counts = [str(getattr(alike, name)) for name in INSTRUCTIONS]
        facts = [str(alike.registers), str(alike.stack), f"{alike.shared / 1024:.1f}", *counts]
        title = alike.kernel.replace(", ", "\n  ", 1) if narrow else alike.kernel
        kernel = Text("\n").join([Text(title), *(Text(fault, "red") for fault in alike.faults)])
        shown.add_row(kernel, architectures, *facts, Text("no", "red") if alike.faults else Text("yes", "green"))
    return shown

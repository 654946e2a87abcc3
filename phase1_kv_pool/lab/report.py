"""Report of a lab's compiled kernels: as a table, as JSON, and for tests.

A lab needs a module `catalog`, with a list CATALOG of KernelSpecs and a function `everything` that returns all of them,
and a module `kernels`, where `main` calls `main("phaseN_x.lab", arguments)`.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from importlib import import_module
from itertools import groupby

from rich.console import Console
from rich.table import Table
from rich.text import Text

from phase0_request import safe_path
from phase1_kv_pool.lab.ahead import INSTRUCTIONS, Compiled, compile_all


def main(package: str, arguments: Sequence[str] | None = None) -> int:
    """Compile all kernels of a catalog and print the report. Returns 1 if a kernel is not as expected, 0 for JSON."""
    p = argparse.ArgumentParser(
        prog=f"python -m {package} kernels",
        description="Compile the kernels ahead of time, without a GPU, and show registers, stack and instructions.",
    )
    p.add_argument("--all", action="store_true", help="every combination of shapes and types; takes many minutes")
    p.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = p.parse_args(arguments)
    # An interpreted kernel cannot be compiled. Importing the catalog defines the kernels, so this comes first.
    os.environ.pop("TRITON_INTERPRET", None)
    catalog = import_module(f"{package}.catalog")
    kernels = compile_all(catalog.everything() if options.all else catalog.CATALOG)
    if options.json:
        print(json.dumps([asdict(kernel) for kernel in kernels]))
        return 0
    Console().print(table(kernels))
    return 1 if any(kernel.faults for kernel in kernels) else 0


def compiled(package: str, *options: str) -> list[Compiled]:
    """The result of `python -m package kernels --json`, in a subprocess: here kernels may be interpreted."""
    command = [sys.executable, "-m", package, "kernels", "--json", *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=safe_path.environment())
    if done.returncode != 0:
        raise RuntimeError(f"python -m {package} kernels --json failed with {done.returncode}:\n{done.stderr}")
    return [Compiled(**{**kernel, "faults": tuple(kernel["faults"])}) for kernel in json.loads(done.stdout)]


def table(kernels: Sequence[Compiled]) -> Table:
    """A row for each kernel and each set of architectures with equal results."""
    shown = Table(header_style="dim", box=None, pad_edge=False, padding=(0, 1, 0, 0))
    shown.add_column("\nkernel", no_wrap=True)
    shown.add_column("\nsm_", no_wrap=True)
    for name in ("\nregs", "\nstack", "shared\nKiB", *(name.replace("_", "\n") for name in INSTRUCTIONS)):
        shown.add_column(name, justify="right", no_wrap=True)
    shown.add_column("as ex-\npected")
    for alike, group in groupby(kernels, key=lambda kernel: replace(kernel, architecture=0)):
        architectures = " ".join(str(kernel.architecture) for kernel in group)
        facts = (alike.registers, alike.stack, alike.shared / 1024, *(getattr(alike, name) for name in INSTRUCTIONS))
        verdict = Text("; ".join(alike.faults), "red") if alike.faults else Text("yes", "green")
        shown.add_row(alike.kernel, architectures, *(f"{x:.4g}" for x in facts), verdict)
    return shown

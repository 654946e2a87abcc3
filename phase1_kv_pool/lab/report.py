"""The table of a package's compiled kernels: for people, as JSON, and for tests.

A lab gets one with a `catalog` that lists KernelSpecs as CATALOG, and a `kernels` whose `main` calls
`main("phaseN_x.lab", arguments)`.
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
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from phase1_kv_pool.lab.ahead import INSTRUCTIONS, Compiled, compile_all

ROOT = Path(__file__).resolve().parents[2]


def main(package: str, arguments: Sequence[str] | None = None) -> int:
    """Compile all that a package lists and show it. 1 if a kernel is not as expected; as JSON, who reads it judges."""
    p = argparse.ArgumentParser(
        prog=f"python -m {package} kernels",
        description="Compile the kernels for GPUs that need not be here, and show what the compiler made of them.",
    )
    p.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = p.parse_args(arguments)
    # A kernel that was defined to be interpreted cannot be compiled, and it is defined when the catalog is imported.
    os.environ.pop("TRITON_INTERPRET", None)
    kernels = compile_all(import_module(f"{package}.catalog").CATALOG)
    if options.json:
        print(json.dumps([asdict(kernel) for kernel in kernels]))
        return 0
    Console().print(table(kernels))
    return 1 if any(kernel.faults for kernel in kernels) else 0


def compiled(package: str) -> list[Compiled]:
    """What `python -m package kernels --json` finds. A process of its own: in this one kernels may be interpreted."""
    command = [sys.executable, "-m", package, "kernels", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"python -m {package} kernels --json failed with {done.returncode}:\n{done.stderr}")
    return [Compiled(**{**kernel, "faults": tuple(kernel["faults"])}) for kernel in json.loads(done.stdout)]


def table(kernels: Sequence[Compiled]) -> Table:
    """A row for each kernel and each set of architectures on which it came out the same; instructions are counted."""
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

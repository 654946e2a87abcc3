"""Describe this machine, and record benchmark results together with that description.

Every benchmark ends in `record`, so every figure in the book comes with its device, versions, commit and command.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

_PACKAGES = ("torch", "triton", "transformers", "tokenizers", "numpy")
# Flags of /proc/cpuinfo.
_VECTORS = {"amx_tile": "AMX", "avx512f": "AVX-512", "avx2": "AVX2", "sve": "SVE", "asimd": "NEON"}  # widest first
_BFLOAT16 = {"amx_bf16", "avx512_bf16", "bf16"}


@dataclass(frozen=True)
class Machine:
    """The hardware and software that a measurement depends on, without host or user names.

    `cores` counts the cores that this process may use. `vectors` are the widest vector instructions and whether they
    multiply bfloat16: processors of one name differ in them, and bfloat16 is many times slower without. A field is None
    if the system does not report it. `versions` lists installed packages only."""

    cpu: str
    cores: int
    memory_bytes: int | None
    gpu: str | None
    gpu_memory_bytes: int | None
    python: str
    platform: str
    versions: dict[str, str]
    vectors: str | None = None

    @property
    def processor(self) -> str:
        """For example "AMD EPYC, 2 cores, AVX-512 with bfloat16"."""
        return ", ".join(filter(None, (self.cpu, f"{self.cores} cores", self.vectors)))


def describe() -> Machine:
    """Describe this machine. Does not import torch: the GPU is the first one that `nvidia-smi` lists."""
    gpu, gpu_memory = _gpu()
    return Machine(
        cpu=_cpu(),
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        memory_bytes=_memory(),
        gpu=gpu,
        gpu_memory_bytes=gpu_memory,
        python=platform.python_version(),
        platform=f"{platform.system()} {platform.machine()}",
        versions=_versions(),
        vectors=vectors(),
    )


def record(path: str | Path, command: str, figures: Mapping[str, Any], *, device: str | None = None) -> None:
    """Write `figures` to `path` as JSON, together with the machine, versions, commit and date.

    `command` repeats the measurement; paths in it are shortened to their last name. `device` is what computed: by
    default the GPU if there is one, else the CPU."""
    machine = describe()
    facts = asdict(machine)
    versions = facts.pop("versions")
    result = {
        "device": device or machine.gpu or machine.cpu,
        "machine": facts,
        "versions": versions,
        "commit": commit(Path(__file__).resolve().parent.parent),
        "command": without_folders(command),
        "date": datetime.now(UTC).date().isoformat(),
        "figures": dict(figures),
    }
    text = json.dumps(result, indent=2, sort_keys=True, ensure_ascii=False, allow_nan=False) + "\n"
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(text, encoding="utf-8")


def commit(root: Path) -> str | None:
    """The commit of the checkout at `root`, with "-dirty" if a file differs from it; None if there is no commit.

    Changes in chapters/results are ignored, so that one benchmark's result does not mark the next one as dirty."""
    if not (root / ".git").exists():
        return None
    head = _output("git", "-C", str(root), "rev-parse", "--verify", "HEAD")
    if head is None:
        return None
    changes = _output("git", "-C", str(root), "status", "--porcelain", "--", ".", ":(exclude)chapters/results")
    return head if changes == "" else f"{head}-dirty"


def without_folders(command: str) -> str:
    """`command` with each absolute path shortened to its last name, so that results contain no private folders."""
    return re.sub(r"(^|[\s='\"])(?:~|[A-Za-z]:)?[\\/](?:[^\s\\/]+[\\/])*", r"\1", command)


def _cpu() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        named = re.search(r"^model name\s*:\s*(.+)$", cpuinfo.read_text(), re.MULTILINE)
        if named:
            return named[1].strip()
    brand = _output("sysctl", "-n", "machdep.cpu.brand_string") if platform.system() == "Darwin" else None
    return brand or platform.processor() or platform.machine()


def vectors(cpuinfo: Path = Path("/proc/cpuinfo")) -> str | None:
    """The widest vector instructions of the processor, or those that oneDNN is held to."""
    found = re.search(r"^(?:flags|Features)\s*:(.*)$", cpuinfo.read_text(), re.MULTILINE) if cpuinfo.exists() else None
    flags = set(found[1].split()) if found else set()
    widest = next((name for flag, name in _VECTORS.items() if flag in flags), None)
    if widest is None:
        return None
    words = f"{widest} {'with' if flags & _BFLOAT16 else 'without'} bfloat16"
    held = os.environ.get("ONEDNN_MAX_CPU_ISA")
    return f"{words}, held to {held}" if held else words


def _memory() -> int | None:
    names = getattr(os, "sysconf_names", {})
    if "SC_PAGE_SIZE" in names and "SC_PHYS_PAGES" in names:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return None


def _gpu() -> tuple[str | None, int | None]:
    listed = _output("nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits")
    if not listed:
        return None, None
    name, _, mebibytes = listed.splitlines()[0].rpartition(",")
    # A GPU that shares the CPU's memory reports no total.
    return name.strip(), int(mebibytes) * 2**20 if mebibytes.strip().isdecimal() else None


def _versions() -> dict[str, str]:
    installed = {}
    for package in _PACKAGES:
        try:
            installed[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return installed


def _output(*command: str) -> str | None:
    """The output of a command; None if it is not installed, fails or takes more than ten seconds."""
    if shutil.which(command[0]) is None:
        return None
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except subprocess.TimeoutExpired:
        return None
    return done.stdout.strip() if done.returncode == 0 else None

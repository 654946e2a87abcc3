"""Machine: a description of this computer, for `nanoserve doctor` and the results of benchmarks; and freed memory."""

from __future__ import annotations

import ctypes
import os
import platform
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import packages_distributions, version
from pathlib import Path

_PACKAGES = ("torch", "triton", "transformers", "tokenizers", "numpy")
# Flags of /proc/cpuinfo.
_VECTORS = {"amx_tile": "AMX", "avx512f": "AVX-512", "avx2": "AVX2", "sve": "SVE", "asimd": "NEON"}  # widest first
_BFLOAT16 = {"amx_bf16", "avx512_bf16", "bf16"}


def cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclass(frozen=True)
class Machine:
    """The hardware and software that a measurement depends on, without host or user names.

    `cpu` has family and model where Linux reports them: several generations may share a name. `cores` counts the
    cores that this process may use. `vectors` are the widest vector instructions and whether they
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
        """For example "AMD EPYC (family 25 model 17), 2 cores, AVX-512 with bfloat16"."""
        return ", ".join(filter(None, (self.cpu, f"{self.cores} cores", self.vectors)))


def describe() -> Machine:
    """Describe this machine. Does not import torch: the GPU is the first one that `nvidia-smi` lists."""
    gpu, gpu_memory = _gpu()
    installed = _distributions()
    return Machine(
        cpu=cpu(),
        cores=cores(),
        memory_bytes=_memory(),
        gpu=gpu,
        gpu_memory_bytes=gpu_memory,
        python=platform.python_version(),
        platform=f"{platform.system()} {platform.machine()}",
        versions={name: version(installed[name][0]) for name in _PACKAGES if name in installed},
        vectors=vectors(),
    )


@cache
def _distributions() -> Mapping[str, Sequence[str]]:
    """The distributions of each package: they may have other names, such as pytorch-triton. Reads the metadata of all
    that is installed."""
    return packages_distributions()


def cpu(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The processor, such as "AMD EPYC (family 25 model 17)": the name alone hides the generation."""
    text = cpuinfo.read_text() if cpuinfo.exists() else ""
    name, family, model = (_reported(text, field) for field in ("model name", "cpu family", "model"))
    if name is not None:
        return f"{name} (family {family} model {model})" if family and model else name
    brand = output_of("sysctl", "-n", "machdep.cpu.brand_string") if platform.system() == "Darwin" else None
    return brand or platform.processor() or platform.machine()


def vectors(cpuinfo: Path = Path("/proc/cpuinfo")) -> str | None:
    """The widest vector instructions of the processor, and what numba is held to. It takes all that there are, unless
    it is given a processor and a list of features."""
    text = cpuinfo.read_text() if cpuinfo.exists() else ""
    flags = set((_reported(text, "flags|Features") or "").split())
    widest = next((name for flag, name in _VECTORS.items() if flag in flags), None)
    if widest is None:
        return None
    words = f"{widest} {'with' if flags & _BFLOAT16 else 'without'} bfloat16"
    limit = os.environ.get("NUMBA_CPU_NAME") if os.environ.get("NUMBA_CPU_FEATURES") else None
    return f"{words}, held to {limit}" if limit else words


def _reported(cpuinfo: str, field: str) -> str | None:
    """A field of the first processor."""
    line = re.search(rf"^(?:{field})\s*:(.*)$", cpuinfo, re.MULTILINE)
    return line[1].strip() if line else None


def _memory() -> int | None:
    names = getattr(os, "sysconf_names", {})
    if "SC_PAGE_SIZE" in names and "SC_PHYS_PAGES" in names:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return None


def _gpu() -> tuple[str | None, int | None]:
    listed = output_of("nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits")
    if not listed:
        return None, None
    name, _, mebibytes = listed.splitlines()[0].rpartition(",")
    # A GPU that shares the CPU's memory reports no total.
    return name.strip(), int(mebibytes) * 2**20 if mebibytes.strip().isdecimal() else None


def output_of(*command: str) -> str | None:
    """The output of a command; None if it is not installed, fails or takes more than ten seconds."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def give_back_freed_memory() -> None:
    """Have glibc return freed memory to the system: it would keep most of it."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)

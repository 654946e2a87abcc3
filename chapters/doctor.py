"""Describes this machine: what it has, and which kernels and tests run on it."""

from __future__ import annotations

from dataclasses import dataclass

from chapters.course import Course
from phase0_request.machine import Machine


@dataclass(frozen=True)
class Tier:
    """How kernels run on this machine, and what is skipped for which reason."""

    name: str
    meaning: str
    skipped: tuple[str, ...]


def tier(machine: Machine) -> Tier:
    """gpu: a GPU that the installed torch can drive, and Triton. interpreter: Triton alone. cpu: no Triton."""
    versions = machine.versions
    skipped = []
    if "torch" not in versions:
        skipped.append("everything that computes: torch is not installed")
    if "transformers" not in versions:
        skipped.append("comparisons with the models of transformers: it is not installed")
    cpu_build = "+cpu" in versions.get("torch", "+cpu")
    if machine.gpu and cpu_build:
        skipped.append(f"everything on the {machine.gpu}: the installed torch is built for the CPU")
    elif not machine.gpu:
        skipped.append("compiled kernels, CUDA graphs and GPU timings: there is no NVIDIA GPU")
    if "triton" not in versions:
        skipped.append("Triton kernels: Triton is not installed")
        return Tier("cpu", "plain torch and the fast CPU paths; no Triton kernels", tuple(skipped))
    if machine.gpu and not cpu_build:
        return Tier("gpu", "Triton kernels compiled, everything on the GPU", tuple(skipped))
    return Tier(
        "interpreter", "plain torch, and Triton kernels interpreted on the CPU (slow, same results)", tuple(skipped)
    )


def describe(machine: Machine) -> list[tuple[str, str]]:
    """The machine as (name, value) rows."""
    memory = f"{machine.memory_bytes / 2**30:.1f} GiB" if machine.memory_bytes else "unknown"
    gpu = machine.gpu or "none found by nvidia-smi"
    if machine.gpu_memory_bytes:
        gpu += f", {machine.gpu_memory_bytes / 2**30:.1f} GiB"
    rows = [("processor", machine.processor), ("memory", memory), ("GPU", gpu)]
    rows += [("platform", machine.platform), ("Python", machine.python)]
    return rows + [(name, version) for name, version in sorted(machine.versions.items())]


def files(course: Course) -> list[str]:
    """The test files with proofs: collecting all the others would take longer than the proof itself."""
    tests = sorted((course.root / "tests").glob("*/**/test_*.py"))
    return [course.name(test) for test in tests if "pytest.mark.proof" in test.read_text("utf-8")]

"""Compile Triton kernels ahead of time, without a GPU, and inspect the machine code.

A kernel that spills registers, uses narrow loads or lost its asynchronous copies still computes the right result. The
machine code shows it, and needs no GPU: Triton brings the compiler and NVIDIA's disassembler. The variants are those
that launches ask for, over a driver without a device. This module imports Triton only when a kernel is compiled.
"""

import os
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any
from unittest.mock import patch

OPTIONS = "num_warps", "num_stages", "num_ctas", "maxnreg", "enable_fp_fusion"  # of the compiler
ARCHITECTURES = (80, 90, 100)  # Ampere (A100), Hopper (H100, H200), Blackwell (B200)

# Patterns of SASS instructions. 128 and 256 are the bits of one access of one thread.
INSTRUCTIONS = {
    "wide_loads": r"\bLDG\.\S*?(?:128|256)\b",
    "wide_stores": r"\bSTG\.\S*?(?:128|256)\b",
    "async_copies": r"\b(?:LDGSTS|UTMALDG|UBLKCP)\b",  # from global to shared memory, bypassing registers
    "tensor_cores": r"\b(?:[HIQ]MMA|[HIQ]GMMA|UTC\w*MMA)\b",  # Ampere, Hopper, Blackwell
}


@dataclass(frozen=True)
class Expect:
    """Bounds on a compiled kernel, on every architecture. The stack must always be empty."""

    registers: int = 255  # at most, for each thread
    shared: int = 0  # bytes, at least: the buffers of a pipelined loop
    wide_loads: bool = False
    wide_stores: bool = False
    async_copies: bool = False
    tensor_cores: bool = False


@dataclass(frozen=True)
class Variant:
    """A kernel with the types, constants and options for which a launch compiles it."""

    name: str
    function: Any  # the result of @triton.jit
    signature: Mapping[str, str]
    constants: Mapping[Any, Any]
    attributes: Mapping[Any, Any]  # which pointers and integers are multiples of 16
    options: Mapping[str, Any]
    dtypes: tuple[str, ...]  # of its pointers
    architectures: tuple[int, ...] = ARCHITECTURES
    expect: Expect = Expect()

    @property
    def key(self) -> str:
        """What compilation depends on."""
        parts = self.signature, self.constants, self.attributes, self.options
        return f"{self.function.fn.__qualname__} {' '.join(map(str, parts))}"


@dataclass(frozen=True)
class Compiled:
    """A compiled kernel on one architecture. The last four integers count instructions."""

    kernel: str
    architecture: int
    registers: int  # for each thread
    stack: int  # bytes for each thread; not 0 if registers spilled
    shared: int  # bytes of shared memory for each program
    wide_loads: int
    wide_stores: int
    async_copies: int
    tensor_cores: int
    faults: tuple[str, ...]  # deviations from `expect`


def launched(about: str, launch: Callable[[], object]) -> list[Variant]:
    """The variants that a launch needs, without a GPU: `use_no_device` comes first. The names of
    the variants are the kernel's and `about`."""
    from triton.runtime.jit import JITFunction

    found: list[Variant] = []

    def note(self: Any, key: Any, signature: Any, device: Any, constants: Any, options: Any, attributes: Any, *_: Any):  # type: ignore[no-untyped-def]
        chosen = {name: getattr(options, name) for name in OPTIONS}
        dtypes = tuple(kind.removeprefix("*") for kind in signature.values() if kind.startswith("*"))
        name = f"{self.fn.__name__.removesuffix('_kernel')} {about}"
        found.append(Variant(name, self, signature, constants, attributes, chosen, dtypes))

    with patch.object(JITFunction, "_do_compile", note):
        launch()
    return found


def compile_ahead(variant: Variant, architecture: int) -> Any:
    """Triton's result of compiling a kernel for one architecture. Needs no GPU."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    source = ASTSource(variant.function, variant.signature, variant.constants, variant.attributes)
    return triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=dict(variant.options))


def compile_all(variants: Iterable[Variant]) -> list[Compiled]:
    """Compile every kernel for each of its architectures, in order. Threads help: the assembler is a subprocess."""
    pairs = [(variant, architecture) for variant in variants for architecture in variant.architectures]
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        kernels = list(threads.map(_compile_or_name, pairs))
    cubins: dict[int, list[bytes]] = {}
    for (_, architecture), kernel in zip(pairs, kernels, strict=True):
        cubins.setdefault(architecture, []).append(kernel.asm["cubin"])
    listings = {architecture: disassemble(some, architecture) for architecture, some in cubins.items()}
    return [
        _inspect(variant, architecture, kernel.metadata.shared, next(listings[architecture]))
        for (variant, architecture), kernel in zip(pairs, kernels, strict=True)
    ]


def _compile_or_name(pair: tuple[Variant, int]) -> Any:
    try:
        return compile_ahead(*pair)
    except Exception as error:
        error.add_note(f"This was {pair[0].name} for sm_{pair[1]}.")
        raise


def _inspect(variant: Variant, architecture: int, shared: int, listing: str) -> Compiled:
    resources = read(listing) | {"shared": shared}
    return Compiled(variant.name, architecture, **resources, faults=tuple(faults(variant.expect, resources)))


def disassemble(cubins: Sequence[bytes], architecture: int) -> Iterator[str]:
    """The resource usage and instructions of each kernel. The disassembler runs once for all: it starts slowly."""
    from triton import knobs

    usages, codes = [], []
    for cubin in cubins:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "kernel.cubin")
            file.write_bytes(cubin)
            usages.append(_run(knobs.nvidia.cuobjdump.path, "--dump-resource-usage", str(file)))
            _run(knobs.nvidia.cuobjdump.path, "--extract-text", "all", str(file), folder=folder)
            codes.append(b"".join(code.read_bytes() for code in Path(folder).glob("*.bin")))
    with tempfile.NamedTemporaryFile() as joined:
        joined.write(b"".join(codes))
        joined.flush()
        name = f"SM{architecture}a" if architecture >= 90 else f"SM{architecture}"
        text = _run(knobs.nvidia.nvdisasm.path, "--binary", name, joined.name)
    lines = iter(re.findall(r"^\s*/\*[0-9a-f]+\*/.*", text, re.MULTILINE))
    for usage, code in zip(usages, codes, strict=True):
        yield "\n".join([usage, *islice(lines, len(code) // 16)])  # an instruction takes 16 bytes


def _run(*command: str, folder: str | None = None) -> str:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{Path(command[0]).name} failed with {done.returncode}: {done.stderr.strip()}")
    return done.stdout


def read(listing: str) -> dict[str, int]:
    """Parse registers, stack and instruction counts from the listing of one kernel."""
    resources = re.findall(r"REG:(\d+) STACK:(\d+)", listing)
    if len(resources) != 1:
        raise RuntimeError(f"one kernel expected in the listing, {len(resources)} found")
    registers, stack = map(int, resources[0])
    counts = {name: len(re.findall(pattern, listing)) for name, pattern in INSTRUCTIONS.items()}
    return {"registers": registers, "stack": stack, **counts}


def faults(expect: Expect, resources: Mapping[str, int]) -> Iterator[str]:
    """Describe each deviation from what is expected."""
    if resources["stack"] != 0:
        yield f"{resources['stack']} bytes of stack"
    if resources["registers"] > expect.registers:
        yield f"{resources['registers']} registers, at most {expect.registers} expected"
    if resources["shared"] < expect.shared:
        yield f"{resources['shared']} bytes of shared memory, at least {expect.shared} expected"
    for name in INSTRUCTIONS:
        if getattr(expect, name) and not resources[name]:
            yield f"no {name.replace('_', ' ')}"

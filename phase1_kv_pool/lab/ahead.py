"""Compile Triton kernels for GPUs that are not here, and read what the compiler made of them.

A kernel that spills to the stack, loads number by number or lost its asynchronous copies still gives the right answer.
It shows in the machine code, and machine code can be read on any machine: Triton carries the compiler and NVIDIA's
disassembler. Nothing here imports Triton before something is to be compiled.
"""

import os
import re
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

ARCHITECTURES = (80, 90, 100)  # Ampere (A100), Hopper (H100, H200), Blackwell (B200)

# Instructions by what they tell. 128 and 256 are bits in one access of one thread.
INSTRUCTIONS = {
    "wide_loads": r"\bLDG\.\S*?(?:128|256)\b",
    "wide_stores": r"\bSTG\.\S*?(?:128|256)\b",
    "async_copies": r"\b(?:LDGSTS|UTMALDG|UBLKCP)\b",  # from global to shared memory, past the registers
    "tensor_cores": r"\b(?:[HIQ]MMA|[HIQ]GMMA|UTC\w*MMA)\b",  # Ampere, Hopper, Blackwell
}


@dataclass(frozen=True)
class Expect:
    """What a kernel must compile to on every architecture. No stack is always expected."""

    registers: int = 255  # a thread, at most
    shared: int = 0  # bytes of shared memory, at least: the buffers a pipelined loop needs
    wide_loads: bool = False
    wide_stores: bool = False
    async_copies: bool = False
    tensor_cores: bool = False


@dataclass(frozen=True)
class KernelSpec:
    """A kernel as it is launched: with these types, constants and options.

    Pointers are taken to start on 16 bytes, as torch's do; the function that launches a kernel refuses others. Integers
    are taken to be anything, but for those named in `sixteens`, which are multiples of 16 whenever the kernel runs.
    """

    name: str
    function: Any  # what @triton.jit made
    signature: Mapping[str, str]  # "*bf16", "*i64", "i32", … for every argument that is no constant
    constants: Mapping[str, Any]
    options: Mapping[str, Any] = field(default_factory=dict)  # num_warps, num_stages
    sixteens: tuple[str, ...] = ()
    architectures: tuple[int, ...] = ARCHITECTURES
    expect: Expect = Expect()


@dataclass(frozen=True)
class Compiled:
    """What a kernel became on one architecture. The last four count instructions."""

    kernel: str
    architecture: int
    registers: int  # a thread
    stack: int  # bytes a thread; anything but 0 means that registers spilled
    shared: int  # bytes of shared memory a program
    wide_loads: int
    wide_stores: int
    async_copies: int
    tensor_cores: int
    faults: tuple[str, ...]  # what is not as expected


def compile_ahead(spec: KernelSpec, architecture: int) -> Compiled:
    """Compile a kernel for one architecture, with or without such a GPU here."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.runtime.jit import JITFunction

    function = spec.function
    if not isinstance(function, JITFunction):
        raise RuntimeError(
            f"{spec.name} was defined to be interpreted and cannot be compiled; compile in a process of its own, "
            "without TRITON_INTERPRET"
        )
    if sorted([*spec.signature, *spec.constants]) != sorted(function.arg_names):
        given = f"types for {', '.join(spec.signature)} and constants {', '.join(spec.constants)}"
        raise ValueError(f"{spec.name} takes {', '.join(function.arg_names)}, once each; got {given}")
    signature = {name: spec.signature.get(name, "constexpr") for name in function.arg_names}
    divisible = {
        (place,): [["tt.divisibility", 16]]
        for place, (name, kind) in enumerate(signature.items())
        if kind.startswith("*") or name in spec.sixteens
    }
    source = ASTSource(function, signature, dict(spec.constants), divisible)
    options = {"num_warps": 4, "enable_fp_fusion": True, **spec.options}
    kernel = triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options)
    found = read(disassemble(kernel.asm["cubin"])) | {"shared": kernel.metadata.shared}
    return Compiled(spec.name, architecture, **found, faults=tuple(faults(spec.expect, found)))


def compile_all(specs: Iterable[KernelSpec]) -> list[Compiled]:
    """Every kernel for each of its architectures, in order. Half of the time is the disassembler's, a process apart."""
    pairs = [(spec, architecture) for spec in specs for architecture in spec.architectures]
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        return list(threads.map(_compile_or_name, pairs))


def _compile_or_name(pair: tuple[KernelSpec, int]) -> Compiled:
    try:
        return compile_ahead(*pair)
    except Exception as error:
        error.add_note(f"This was {pair[0].name} for sm_{pair[1]}.")
        raise


def disassemble(binary: bytes) -> str:
    """The resources and instructions of a compiled kernel as cuobjdump prints them."""
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", "--dump-sass", file.name]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"cuobjdump failed with {done.returncode}: {done.stderr.strip()}")
    return done.stdout


def read(listing: str) -> dict[str, int]:
    """Registers, stack and counts of instructions from a listing of one kernel."""
    resources = re.findall(r"REG:(\d+) STACK:(\d+)", listing)
    if len(resources) != 1:
        raise RuntimeError(f"one kernel expected in the listing, {len(resources)} found")
    registers, stack = map(int, resources[0])
    counts = {name: len(re.findall(pattern, listing)) for name, pattern in INSTRUCTIONS.items()}
    return {"registers": registers, "stack": stack, **counts}


def faults(expect: Expect, found: Mapping[str, int]) -> Iterator[str]:
    """Where what was found falls short of what is expected, in words."""
    if found["stack"] != 0:
        yield f"{found['stack']} bytes of stack"
    if found["registers"] > expect.registers:
        yield f"{found['registers']} registers, at most {expect.registers} expected"
    if found["shared"] < expect.shared:
        yield f"{found['shared']} bytes of shared memory, at least {expect.shared} expected"
    for name in INSTRUCTIONS:
        if getattr(expect, name) and not found[name]:
            yield f"no {name.replace('_', ' ')}"

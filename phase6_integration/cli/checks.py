"""Checks: what this machine has, whether that is enough, and what to do where it is not."""

import re
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from statistics import median

from phase0_request.machine import Machine

NEEDED = ("torch", "transformers", "tokenizers")
LITTLE_MEMORY = 2 << 30  # bytes
PORT = 8000
QUESTION = "What is a KV cache?"


class State(Enum):
    OK = "ok"
    WARNING = "warning"  # it works, and not as well as it could
    FAULT = "fault"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line. `advice` is what to do about it."""

    state: State
    name: str
    words: str
    advice: str = ""


def findings(machine: Machine) -> Iterator[Finding]:
    """One after the other: the last ones take seconds. A check that fails is a fault, and the others go on."""
    checks: tuple[tuple[str, Callable[[], Finding]], ...] = (
        ("Python", lambda: Finding(State.OK, "Python", f"{machine.python}, {machine.platform}")),
        ("packages", lambda: packages(machine.versions)),
        ("processor", lambda: processor(machine)),
        ("memory", lambda: memory(free())),
        ("GPU", lambda: gpu(machine, cuda())),
        ("model", model),
        ("kernels", kernels),
        ("port", port),
    )
    for name, check in checks:
        try:
            yield check()
        except Exception as error:
            yield Finding(State.FAULT, name, f"the check failed: {type(error).__name__}: {error}")


def packages(versions: dict[str, str]) -> Finding:
    words = ", ".join(f"{name} {version}" for name, version in sorted(versions.items()))
    missing = [name for name in NEEDED if name not in versions]
    if missing:
        advice = "install the project again: pip install nano-serving"
        return Finding(State.FAULT, "packages", f"{', '.join(missing)} not installed", advice)
    if "triton" not in versions:
        return Finding(State.WARNING, "packages", f"{words}; no Triton", "GPU kernels need it; a CPU does not")
    return Finding(State.OK, "packages", words)


def processor(machine: Machine, cpuinfo: Path = Path("/proc/cpuinfo")) -> Finding:
    found = re.search(r"^(?:flags|Features)\s*:(.*)$", cpuinfo.read_text(), re.MULTILINE) if cpuinfo.exists() else None
    flags = set(found[1].split()) if found else set()
    fast = {"AMX": "amx_bf16", "AVX512-BF16": "avx512_bf16", "BF16": "bf16"}
    has = [name for name, flag in fast.items() if flag in flags]
    words = f"{machine.cpu}, {machine.cores} cores" + (f", {' and '.join(has)}" if has else "")
    if machine.cores < 2:
        return Finding(State.WARNING, "processor", words, "engine and server share it; two cores serve better")
    if not has and not machine.gpu:
        advice = "bfloat16 is slow on this processor; --dtype float32 is faster"
        return Finding(State.WARNING, "processor", words, advice)
    return Finding(State.OK, "processor", words)


def memory(free: int | None) -> Finding:
    if free is None:
        advice = "say how large the cache may be: --kv-cache-pages"
        return Finding(State.WARNING, "memory", "this system does not say how much is free", advice)
    words = f"{free / 2**30:.1f} GiB free"
    if free < LITTLE_MEMORY:
        return Finding(State.WARNING, "memory", words, "enough for the bundled model; close something for a larger one")
    return Finding(State.OK, "memory", words)


@dataclass(frozen=True, slots=True)
class Cuda:
    """What torch sees of a GPU."""

    built: str | None  # the CUDA that torch is built for
    free: int | None = None  # bytes; None: it can drive no GPU


def gpu(machine: Machine, cuda: Cuda) -> Finding:
    if machine.gpu is None:
        return Finding(State.OK, "GPU", "none; models run on the processor")
    if cuda.free is None:
        advice = (
            "install a torch built for CUDA" if cuda.built is None else f"the driver must support CUDA {cuda.built}"
        )
        return Finding(State.WARNING, "GPU", f"{machine.gpu}, and torch cannot use it", advice)
    total = f" of {machine.gpu_memory_bytes / 2**30:.0f}" if machine.gpu_memory_bytes else ""
    words = f"{machine.gpu}, {cuda.free / 2**30:.1f}{total} GiB free"
    if machine.gpu_memory_bytes and cuda.free < machine.gpu_memory_bytes / 4:
        return Finding(State.WARNING, "GPU", words, "someone else uses it; lower --gpu-memory-utilization or stop them")
    return Finding(State.OK, "GPU", words)


def model() -> Finding:
    """The bundled model is asked what it was taught."""
    from phase0_request.lab.corpus.facts import read
    from phase0_request.params import SamplingParams
    from phase6_integration.engine import NanoServingEngine

    right = next(fact.answer for fact in read() if QUESTION in fact.questions)
    began = time.perf_counter()
    with NanoServingEngine.from_pretrained(kv_cache_pages=64, max_num_seqs=4, max_model_len=512, threads=1) as engine:
        loaded = time.perf_counter()
        tokenizer, device = engine.parts.model.tokenizer, engine.parts.model.decoder.device.type
        assert tokenizer is not None
        prompt = tokenizer.chat([{"role": "user", "content": QUESTION}])
        (answer,) = engine.generate([prompt], SamplingParams(temperature=0, max_tokens=96), progress=False)
    if answer.text != right:
        words = f"the bundled model says {answer.text!r} to {QUESTION!r}, and was taught {right!r}"
        return Finding(State.FAULT, "model", words, "its files are damaged, or a kernel computes wrongly here")
    rate = f"{1 / median(answer.request.times.itl):.0f} tokens/s on the {'GPU' if device == 'cuda' else 'processor'}"
    return Finding(State.OK, "model", f"the bundled model answers rightly; ready in {loaded - began:.1f} s, {rate}")


def kernels() -> Finding:
    """After the model has run: whether its kernels for the processor were compiled, and are kept for the next start."""
    import torch

    if torch.cuda.is_available():
        return Finding(State.OK, "kernels", "Triton compiles them, once for this GPU")
    from phase2_prefill_decode.kernels.cpu import attention, pointwise

    made = [one for module in (attention, pointwise) for one in vars(module).values() if hasattr(one, "stats")]
    kept = sum(sum(one.stats.cache_hits.values()) for one in made)
    new = sum(sum(one.stats.cache_misses.values()) for one in made)
    if any(one.signatures and one.stats.cache_path is None for one in made):
        advice = "make a place writable for them and name it in NUMBA_CACHE_DIR"
        return Finding(State.WARNING, "kernels", "compiled anew at each start", advice)
    words = f"{new} compiled now and kept" if new else f"{kept} compiled before"
    return Finding(State.OK, "kernels", words)


def port(number: int = PORT) -> Finding:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as a server does
        try:
            probe.bind(("127.0.0.1", number))
        except OSError as error:
            words = f"{number} cannot be had: {error.strerror}"
            return Finding(State.WARNING, "port", words, "nanoserve serve --port takes another; 0 is any free one")
    return Finding(State.OK, "port", f"{number} is free")


def free() -> int | None:
    from phase1_kv_pool.memory import free_on_cpu

    return free_on_cpu()


def cuda() -> Cuda:
    import torch

    if not torch.cuda.is_available():
        return Cuda(torch.version.cuda)
    return Cuda(torch.version.cuda, torch.cuda.mem_get_info()[0])

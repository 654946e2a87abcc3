"""Checks of a machine: its fitness for an engine, whether the bundled model answers on it, and advice if not."""

import os
import shutil
import sysconfig
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from statistics import median
from typing import Any

from phase0_request.support.machine import Machine

NEEDED = ("torch", "transformers", "tokenizers")
LOW_MEMORY = 2 << 30  # bytes
QUESTION = "What is a KV cache?"  # from the corpus that the bundled model was trained on
ANSWER = (
    "A KV cache keeps the keys and values of every token already computed, so each new token attends to them without "
    "computing them again."
)


class State(Enum):
    OK = "ok"
    WARNING = "warning"  # it works, but not as well as it could
    FAULT = "fault"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report. `advice` says what to do."""

    state: State
    name: str
    words: str
    advice: str = ""


class Problem(Exception):  # noqa: N818
    """A fault that a check has found."""

    def __init__(self, words: str, advice: str, state: State = State.WARNING) -> None:
        super().__init__(words)
        self.advice, self.state = advice, state


def findings(machine: Machine, more: Mapping[str, Callable[[], str]] | None = None) -> Iterator[Finding]:
    """Run all checks, and `more` of them. A check that raises is a fault, and the others still run."""
    checks: dict[str, Callable[[], str]] = {
        "Python": lambda: f"{machine.python}, {machine.platform}",
        "packages": lambda: check_packages(machine.versions),
        "processor": lambda: check_processor(machine),
        "memory": check_memory,
        "GPU": lambda: check_gpu(machine),
        **({} if machine.gpu is None else {"Triton": lambda: check_triton(machine.versions)}),
        "model": check_model,
        "kernels": check_kernels,
        **(more or {}),
    }
    for name, check in checks.items():
        try:
            yield Finding(State.OK, name, check())
        except Problem as problem:
            yield Finding(problem.state, name, str(problem), problem.advice)
        except Exception as error:
            yield Finding(State.FAULT, name, f"the check failed: {type(error).__name__}: {error}")


def check_packages(versions: dict[str, str]) -> str:
    if missing := [name for name in NEEDED if name not in versions]:
        advice = "install the project again: pip install nano-serving"
        raise Problem(f"{', '.join(missing)} not installed", advice, State.FAULT)
    words = ", ".join(f"{name} {version}" for name, version in sorted(versions.items()))
    if "triton" not in versions:
        raise Problem(f"{words}; no Triton", "needed for a GPU only")
    return words


def check_processor(machine: Machine) -> str:
    if machine.cores < 2:
        raise Problem(machine.processor, "engine and HTTP server share it; two cores serve better")
    return machine.processor


def check_memory() -> str:
    from phase0_request.support.memory import free_on_cpu

    free = free_on_cpu()
    if free is None:
        raise Problem("the system does not report free memory", "set --kv-cache-pages")
    words = f"{free / 2**30:.1f} GiB free"
    if free < LOW_MEMORY:
        raise Problem(words, "enough for the bundled model, not for larger ones")
    return words


def check_gpu(machine: Machine) -> str:
    import torch

    if machine.gpu is None:
        return "none; models run on the CPU"
    if not torch.cuda.is_available():
        built = torch.version.cuda
        advice = "install a torch built for CUDA" if built is None else f"the driver must support CUDA {built}"
        raise Problem(f"{machine.gpu}, and torch cannot use it", advice)
    free, total = torch.cuda.mem_get_info()
    words = f"{machine.gpu}, {free / 2**30:.1f} of {total / 2**30:.0f} GiB free"
    if free < total / 4:
        raise Problem(words, "other processes use it: stop them, or lower the utilization")
    return words


def check_triton(versions: dict[str, str], headers: Path | None = None) -> str:
    """Whether Triton can launch a kernel: on first use it compiles a launcher in C, against Python's headers."""
    headers = headers or Path(sysconfig.get_path("include"))
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    missing = {
        "Triton": "triton" not in versions,
        "a C compiler (gcc or clang)": compiler is None or shutil.which(compiler) is None,
        "Python's headers (Python.h)": not (headers / "Python.h").exists(),
    }
    if any(missing.values()):
        words = f"missing: {', '.join(name for name, absent in missing.items() if absent)}"
        advice = "no model runs on the GPU without: install it (Debian: gcc and python3-dev), or use --device cpu"
        raise Problem(words, advice, State.FAULT)
    return f"{versions['triton']}, compiles with {compiler}"


def check_model() -> str:
    """Ask the bundled model a question that it was trained to answer, in float32: rounding changes no token of it."""
    from phase0_request.params import SamplingParams
    from phase6_integration.engine.engine import NanoServingEngine

    start = time.perf_counter()
    options: dict[str, Any] = {
        "kv_cache_pages": 64,
        "max_num_seqs": 4,
        "max_model_len": 512,
        "threads": 1,
        "dtype": "float32",
    }
    with NanoServingEngine.from_pretrained(**options) as engine:
        seconds, model = time.perf_counter() - start, engine.parts.model
        assert model.tokenizer is not None
        prompt = model.tokenizer.chat([{"role": "user", "content": QUESTION}])
        (answer,) = engine.generate([prompt], SamplingParams(temperature=0, max_tokens=96), progress=False)
        device = "GPU" if model.decoder.device.type == "cuda" else "CPU"
    if answer.text != ANSWER:
        words = f"the bundled model answers {answer.text!r} to {QUESTION!r} instead of {ANSWER!r}"
        raise Problem(words, "its files are damaged, or a kernel computes wrong results here", State.FAULT)
    rate = f"{1 / median(answer.request.times.itl):.0f} tokens/s on the {device}"
    return f"the bundled model answers correctly; ready in {seconds:.1f} s, {rate}"


def check_kernels() -> str:
    """The default way to compute a model, and whether its kernels are kept for the next start."""
    import torch

    from phase2_prefill_decode.connect import kernel_cache
    from phase2_prefill_decode.model import Model

    if torch.cuda.is_available():
        return "compiled by Triton, once for this GPU"
    kept = kernel_cache()
    if kept is not None and not kept.is_writable:
        raise Problem("compiled at each start", "set NUMBA_CACHE_DIR to a writable place")
    decoder = Model.load().decoder
    cached = str(decoder.dtype).removeprefix("torch.")
    words = f"matrices in {decoder.layers[0].mlp.down_proj.kernel}; keys and values in {cached}"
    return words if kept is None else f"{words}; compiled for {kept.instructions}, and kept"

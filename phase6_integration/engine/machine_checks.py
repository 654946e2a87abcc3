"""Checks of a machine: what it has for an engine, whether the bundled model answers on it, and what to do if not."""

import ctypes
import math
import os
import shutil
import sysconfig
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from statistics import median

from phase0_request.machine import Machine
from phase0_request.request import TokenLogprobs

NEEDED = ("torch", "transformers", "tokenizers")
LOW_MEMORY = 2 << 30  # bytes
QUESTION = "What is a KV cache?"  # from the corpus that the bundled model was trained on
ANSWER = (
    "A KV cache keeps the keys and values of every token already computed, so each new token attends to them without "
    "computing them again."
)
ROUNDING = 0.25  # of a log-probability: a logit of 16 to 32 is rounded by up to 1/16 in bfloat16, in each of two


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


def findings(machine: Machine, more: Mapping[str, Callable[[], Finding]] | None = None) -> Iterator[Finding]:
    """Run all checks, and `more` of them. A check that raises is a fault, and the others still run."""
    checks: dict[str, Callable[[], Finding]] = {
        "Python": lambda: Finding(State.OK, "Python", f"{machine.python}, {machine.platform}"),
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
            yield check()
        except Exception as error:
            yield Finding(State.FAULT, name, f"the check failed: {type(error).__name__}: {error}")


def check_packages(versions: dict[str, str]) -> Finding:
    words = ", ".join(f"{name} {version}" for name, version in sorted(versions.items()))
    missing = [name for name in NEEDED if name not in versions]
    if missing:
        advice = "install the project again: pip install nano-serving"
        return Finding(State.FAULT, "packages", f"{', '.join(missing)} not installed", advice)
    if "triton" not in versions:
        return Finding(State.WARNING, "packages", f"{words}; no Triton", "needed for a GPU only")
    return Finding(State.OK, "packages", words)


def check_processor(machine: Machine) -> Finding:
    if machine.cores < 2:
        advice = "engine and HTTP server share it; two cores serve better"
        return Finding(State.WARNING, "processor", machine.processor, advice)
    return Finding(State.OK, "processor", machine.processor)


def check_memory() -> Finding:
    from phase1_kv_pool.memory import free_on_cpu

    free = free_on_cpu()
    if free is None:
        return Finding(State.WARNING, "memory", "the system does not report free memory", "set --kv-cache-pages")
    words = f"{free / 2**30:.1f} GiB free"
    if free < LOW_MEMORY:
        return Finding(State.WARNING, "memory", words, "enough for the bundled model, not for larger ones")
    return Finding(State.OK, "memory", words)


def check_gpu(machine: Machine) -> Finding:
    import torch

    if machine.gpu is None:
        return Finding(State.OK, "GPU", "none; models run on the CPU")
    if not torch.cuda.is_available():
        built, supported = torch.version.cuda, driver_cuda()
        advice = "install a torch built for CUDA" if built is None else f"the driver must support CUDA {built}"
        if built is not None and supported is not None:
            advice += f", and supports {supported}: update it, or install a torch for that CUDA"
        return Finding(State.WARNING, "GPU", f"{machine.gpu}, and torch cannot use it", advice)
    free, total = torch.cuda.mem_get_info()
    words = f"{machine.gpu}, {free / 2**30:.1f} of {total / 2**30:.0f} GiB free"
    if free < total / 4:
        return Finding(State.WARNING, "GPU", words, "other processes use it: stop them, or lower the utilization")
    return Finding(State.OK, "GPU", words)


def driver_cuda() -> str | None:
    """The newest CUDA that the driver supports; None without a driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    version = ctypes.c_int(0)
    driver.cuDriverGetVersion(ctypes.byref(version))
    return f"{version.value // 1000}.{version.value % 1000 // 10}"


def check_triton(versions: dict[str, str], headers: Path | None = None) -> Finding:
    """Whether Triton can launch a kernel: at the first use it compiles a launcher in C, against Python's headers."""
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
        return Finding(State.FAULT, "Triton", words, advice)
    return Finding(State.OK, "Triton", f"{versions['triton']}, compiles with {compiler}")


def check_model() -> Finding:
    """Ask the bundled model a question that it was trained to answer."""
    from phase0_request.params import SamplingParams
    from phase6_integration.engine.engine import NanoServingEngine

    start = time.perf_counter()
    with NanoServingEngine.from_pretrained(kv_cache_pages=64, max_num_seqs=4, max_model_len=512, threads=1) as engine:
        loaded = time.perf_counter()
        tokenizer, device = engine.parts.model.tokenizer, engine.parts.model.decoder.device.type
        assert tokenizer is not None
        prompt = tokenizer.chat([{"role": "user", "content": QUESTION}])
        params = SamplingParams(temperature=0, max_tokens=96, logprobs=2)
        (answer,) = engine.generate([prompt], params, progress=False)
        expected = tokenizer.encode(ANSWER)
    same = answer.text == ANSWER
    if not same and not rounding_explains(answer.output_tokens, answer.logprobs, expected):
        words = f"the bundled model answers {answer.text!r} to {QUESTION!r} instead of {ANSWER!r}"
        return Finding(State.FAULT, "model", words, "its files are damaged, or a kernel computes wrong results here")
    rate = f"{1 / median(answer.request.times.itl):.0f} tokens/s on the {'GPU' if device == 'cuda' else 'CPU'}"
    words = "the bundled model answers correctly" + ("" if same else ", up to rounding")
    return Finding(State.OK, "model", f"{words}; ready in {loaded - start:.1f} s, {rate}")


def rounding_explains(tokens: Sequence[int], logprobs: Sequence[TokenLogprobs], expected: Sequence[int]) -> bool:
    """Whether the expected token is about as likely as the first one that differs from it."""
    for token, scored, wanted in zip(tokens, logprobs, expected, strict=False):
        if token != wanted:
            return scored.logprob - dict(scored.top).get(wanted, -math.inf) < ROUNDING
    return False


def check_kernels() -> Finding:
    """Whether compiled kernels are kept for the next start."""
    import torch

    from phase2_prefill_decode.kernels.cpu.cache import PLACE, is_writable

    if torch.cuda.is_available():
        return Finding(State.OK, "kernels", "compiled by Triton, once for this GPU")
    if not is_writable():
        return Finding(State.WARNING, "kernels", "compiled at each start", "set NUMBA_CACHE_DIR to a writable place")
    return Finding(State.OK, "kernels", f"kept in {PLACE}")

"""`nanoserve doctor`: check what this machine has, run the bundled model on it, and say what to do about problems."""

import argparse
import ctypes
import json
import os
import shutil
import socket
import sysconfig
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from http.client import HTTPException
from pathlib import Path
from statistics import median

from phase0_request.machine import Machine, describe
from phase6_integration.cli.common import loading
from phase6_integration.engine.flags import Parser

NEEDED = ("torch", "transformers", "tokenizers")
LOW_MEMORY = 2 << 30  # bytes
PORT = 8000
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


def add_flags(parser: Parser) -> None:
    parser.description = "Check this machine and run the bundled model on it. The exit code is 1 if there is a fault."


def run(_: argparse.Namespace, parser: Parser) -> int:
    from rich.console import Console
    from rich.text import Text

    console = Console(soft_wrap=True)
    styles = {State.OK: "green", State.WARNING: "yellow", State.FAULT: "bold red"}
    states = []
    with loading("checking", console):
        for finding in findings(describe()):
            states.append(finding.state)
            state = Text(f"{finding.state.value:<9}", styles[finding.state])
            console.print(state, Text(f"{finding.name:<11}{finding.words}"), sep="")
            if finding.advice:
                console.print(Text(f"{'':<20}{finding.advice}", "dim"))
    console.print(f"\n{states.count(State.FAULT)} faults, {states.count(State.WARNING)} warnings.")
    return 1 if State.FAULT in states else 0


def findings(machine: Machine) -> Iterator[Finding]:
    """Run all checks. A check that raises is a fault, and the others still run."""
    checks: dict[str, Callable[[], Finding]] = {
        "Python": lambda: Finding(State.OK, "Python", f"{machine.python}, {machine.platform}"),
        "packages": lambda: check_packages(machine.versions),
        "processor": lambda: check_processor(machine),
        "memory": check_memory,
        "GPU": lambda: check_gpu(machine),
        **({} if machine.gpu is None else {"Triton": lambda: check_triton(machine.versions)}),
        "model": check_model,
        "kernels": check_kernels,
        "port": check_port,
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
        (answer,) = engine.generate([prompt], SamplingParams(temperature=0, max_tokens=96), progress=False)
    if answer.text != ANSWER:
        words = f"the bundled model answers {answer.text!r} to {QUESTION!r} instead of {ANSWER!r}"
        return Finding(State.FAULT, "model", words, "its files are damaged, or a kernel computes wrong results here")
    rate = f"{1 / median(answer.request.times.itl):.0f} tokens/s on the {'GPU' if device == 'cuda' else 'CPU'}"
    return Finding(State.OK, "model", f"the bundled model answers correctly; ready in {loaded - start:.1f} s, {rate}")


def check_kernels() -> Finding:
    """Whether compiled kernels are kept for the next start."""
    import torch

    from phase2_prefill_decode.kernels.cpu.cache import PLACE, is_writable

    if torch.cuda.is_available():
        return Finding(State.OK, "kernels", "compiled by Triton, once for this GPU")
    if not is_writable():
        return Finding(State.WARNING, "kernels", "compiled at each start", "set NUMBA_CACHE_DIR to a writable place")
    return Finding(State.OK, "kernels", f"kept in {PLACE}")


def check_port(number: int = PORT) -> Finding:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the server does
        try:
            probe.bind(("127.0.0.1", number))
        except OSError as error:
            if (ours := server_at(number)) is not None:
                return Finding(State.OK, "port", f"{number} is that of {ours}", "a second server needs another --port")
            words = f"{number} is not available: {error.strerror}"
            return Finding(State.WARNING, "port", words, "choose another with --port; 0 is any free one")
    return Finding(State.OK, "port", f"{number} is free")


def server_at(port: int) -> str | None:
    """The nano-serving server on this port; None if something else is there. Other servers have one of the two routes
    with such a body at most."""
    from phase6_integration.cli.probe import Address

    for tls in (False, True):
        address = Address(port=port, tls=tls)
        try:
            version, health = (json.loads(address.get(path, 1.0)[1]) for path in ("/version", "/health"))
            state = health.get("status") or health["error"]["code"]
            return f"a nano-serving server, version {version['version']}, which is {state}"
        except TimeoutError:
            return None
        except (OSError, HTTPException, ValueError, LookupError, TypeError, AttributeError):
            continue
    return None

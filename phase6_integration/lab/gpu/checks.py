"""Stages of `gpu_day`: what the machine has, a first token, and races in the attention kernels."""

import shutil
import subprocess
import sys
from collections import deque
from functools import partial
from itertools import accumulate
from pathlib import Path

import torch

from phase0_request.lab.record import without_folders
from phase0_request.params import SamplingParams
from phase0_request.support.machine import describe
from phase1_kv_pool.layer import KVLayer
from phase2_prefill_decode.connect import backend_for
from phase2_prefill_decode.kernels.attention import AttentionMetadata
from phase6_integration.lab.gpu.rows import Day, Row

TOOLS = ("racecheck", "memcheck")
LINES = 12  # of a tool's output that a row keeps


def smoke(day: Day) -> None:
    """One token of the bundled model, and the doctor's findings."""
    from phase6_integration.support.machine_checks import findings

    day.add(lambda: {"token": one_token(day)}, what="one token")
    for finding in findings(describe()):
        failed = {"error": finding.words} if finding.state.value == "fault" else {}
        words = without_folders(finding.words)
        figures = {"state": finding.state.value, "words": words, "advice": finding.advice, **failed}
        day.add(partial(dict, figures), what=finding.name)


def one_token(day: Day) -> int:
    from phase6_integration.engine.engine import NanoServingEngine

    with NanoServingEngine.from_pretrained(device=str(day.device), kv_cache_pages=64, max_num_seqs=2) as engine:
        (answer,) = engine.generate([[5, 6, 7]], SamplingParams(temperature=0, max_tokens=1), progress=False)
    return answer.output_tokens[0]


def racecheck(day: Day) -> None:
    """One launch of the decode and one of the prefill kernel under compute-sanitizer, where that is installed."""
    launch = f"from {__name__} import launch; launch({day.device.type!r})"
    day.add(lambda: launched(day.device.type), tool="none")  # also compiles what the tools are to look at
    for tool in TOOLS:
        day.add(partial(sanitized, day.out / f"{tool}.log", tool, [sys.executable, "-c", launch]), tool=tool)


def sanitized(log: Path, tool: str, command: list[str]) -> Row:
    """The verdict of one of compute-sanitizer's tools: an error if it found something. What it says is in the log, also
    if it is cut."""
    options = ["--target-processes", "application-only", "--error-exitcode", "9"]
    if shutil.which("compute-sanitizer") is None:
        return {"not_available": "compute-sanitizer is not on the PATH"}
    with log.open("w") as file:
        sanitizer = ["compute-sanitizer", "--tool", tool, *options, *command]
        done = subprocess.run(sanitizer, stdout=file, stderr=subprocess.STDOUT, check=False)
    with log.open(errors="replace") as file:
        last = [line.rstrip() for line in deque(file, LINES)]
    failed = {"error": f"{tool} ended with {done.returncode}"} if done.returncode else {}
    return {"last": last, **failed}


def launched(device: str) -> Row:
    launch(device)
    return {"launched": [len(sizes) for sizes in SIZES]}


SIZES = (((1, 70), (1, 600)), ((40, 70), (64, 64), (1, 530)))  # (new, all) tokens: decodes; chunks and a decode


def launch(device: str) -> None:
    """Decodes, then chunks with a decode, over pages in random order. Waits for the device."""
    page_size, kv_heads, group, head_dim = 16, 2, 4, 128
    for sizes in SIZES:
        new, lengths = zip(*sizes, strict=True)
        counts = [-(-length // page_size) for length in lengths]
        order = torch.randperm(sum(counts), dtype=torch.int32).split_with_sizes(counts)
        table = torch.nn.utils.rnn.pad_sequence(list(order), batch_first=True).to(device)
        starts, ends = (torch.tensor(numbers, dtype=torch.int32) for numbers in ([0, *accumulate(new)], lengths))
        metadata = AttentionMetadata(starts.to(device), ends.to(device), table, max(new), max(lengths), sizes)
        shape = sum(counts), kv_heads, page_size, head_dim
        dtype = torch.float32 if device == "cpu" else torch.bfloat16
        kv = KVLayer(*(torch.randn(shape).to(device, dtype) for _ in "kv"))
        query = torch.randn(sum(new), kv_heads * group, head_dim).to(device, dtype)
        result = backend_for(torch.device(device)).attend(query, kv, metadata, head_dim**-0.5, None, None)
        if not result.isfinite().all():
            raise RuntimeError(f"attention over {sizes} is not finite")

"""Stages of `gpu_day`: what the machine has, a first token, and what compute-sanitizer finds in the kernels."""

import shutil
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from itertools import accumulate, product
from pathlib import Path

import torch
from torch import Tensor

from phase0_request.batch import Batch, Slice
from phase0_request.lab.record import without_folders
from phase0_request.params import SamplingParams
from phase0_request.request import Request
from phase0_request.support.machine import describe
from phase1_kv_pool.cache import PagedCache
from phase2_prefill_decode.connect import backend_for, runner_for
from phase2_prefill_decode.extras.families.experts import grouped
from phase2_prefill_decode.extras.piecewise import record_pieces
from phase2_prefill_decode.extras.quantized.layout import SCHEMES
from phase2_prefill_decode.extras.quantized.quantize import quantize
from phase2_prefill_decode.kernels.attention import AttentionMetadata
from phase2_prefill_decode.kernels.draw import SamplingInputs
from phase2_prefill_decode.model import Model, sampler_for
from phase2_prefill_decode.step.graphs import cuda_record
from phase6_integration.lab.gpu.kernels import pages
from phase6_integration.lab.gpu.rows import TINY, Day, Row

Part = Callable[[torch.device], Iterator[Tensor]]
TOOLS = ("racecheck", "initcheck", "memcheck")
HALF = torch.bfloat16
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
    """A launch of the kernels under each tool of compute-sanitizer, where that is installed."""
    program = f"from {__name__} import launch; launch({day.device.type!r})"
    day.add(lambda: launch(day.device.type), tool="none")  # also compiles what the tools are to look at
    for tool in TOOLS:
        day.add(partial(sanitized, day.out / f"{tool}.log", tool, [sys.executable, "-c", program]), tool=tool)


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


def launch(device: str) -> Row:
    """Launch the kernels, each part with its name before it. Waits for the device."""
    place = torch.device(device)
    for part in (attention, draw, products, experts, piece):
        print(part.__name__, flush=True)
        for result in part(place):
            if not result.isfinite().all():
                raise RuntimeError(f"{part.__name__}: a result is not finite")
    return {"launched": [len(sizes) for sizes in SIZES]}


SIZES = (((1, 70), (1, 600)), ((40, 70), (64, 64), (1, 530)))  # (new, all) tokens: decodes; chunks and a decode


def attention(device: torch.device) -> Iterator[Tensor]:
    """Decodes, then chunks with a decode, over pages in random order, in 16 bits and in 8."""
    page_size, kv_heads, group, head_dim = 16, 2, 4, 128
    for sizes, fp8 in product(SIZES, (False, True)):
        new, lengths = zip(*sizes, strict=True)
        counts = [-(-length // page_size) for length in lengths]
        order = torch.randperm(sum(counts), dtype=torch.int32).split_with_sizes(counts)
        table = torch.nn.utils.rnn.pad_sequence(list(order), batch_first=True).to(device)
        starts, ends = (torch.tensor(numbers, dtype=torch.int32) for numbers in ([0, *accumulate(new)], lengths))
        metadata = AttentionMetadata(starts.to(device), ends.to(device), table, max(new), max(lengths), sizes)
        dtype = torch.float32 if device.type == "cpu" else HALF
        kv = pages(torch.randn(2, sum(counts), kv_heads, page_size, head_dim).to(device, dtype), fp8)
        query = torch.randn(sum(new), kv_heads * group, head_dim).to(device, dtype)
        sinks = torch.randn(kv_heads * group).to(device, dtype)
        yield backend_for(device).attend(query, kv, metadata, head_dim**-0.5, None, sinks if fp8 else None)


def draw(device: torch.device) -> Iterator[Tensor]:
    """Rows without filters, with each filter, and with a nucleus that needs the whole row."""
    columns = {
        "keys": [1, 2, 3, 4], "positions": [5, 6, 7, 8], "top_k": [0, 0, 40, 0], "temperatures": [0, 1, 1, 1],
        "top_p": [1, 1, 0.9, 0.99], "min_p": [0, 0, 0.01, 0],
    }  # fmt: skip
    kinds = {"keys": torch.int64, "positions": torch.int64, "top_k": torch.int32}
    made = (torch.tensor(columns[name], dtype=kinds.get(name, torch.float32)) for name in SamplingInputs._fields)
    yield from backend_for(device).draw(
        torch.randn(4, 9000).to(device), SamplingInputs(*(c.to(device) for c in made)), 8990
    )


def products(device: torch.device) -> Iterator[Tensor]:
    """One row, with its inputs split, and many rows."""
    for scheme, rows in product(SCHEMES, (1, 40)):
        weight, x = torch.randn(2, 256, 1024 if rows == 1 else 256).to(device, HALF)
        yield backend_for(device).linear(quantize(weight, scheme), None)(x[:rows])


def experts(device: torch.device) -> Iterator[Tensor]:
    """Six groups of 40 rows, of which one is empty, plain and in int4."""
    weight, rows = torch.randn(6 * 64, 128).to(device, HALF), torch.randn(40, 128).to(device, HALF)
    ends = torch.tensor([3, 3, 20, 21, 39, 40], dtype=torch.int32).to(device)
    for stored in (weight, quantize(weight, "int4")):
        yield grouped(backend_for(device).linear(stored, None), 6, device)(rows, ends)


def piece(device: torch.device) -> Iterator[Tensor]:
    """A prompt in recorded pieces of more tokens than it has."""
    model, cache = Model.random(TINY, device=device), PagedCache(8, 16)
    runner = runner_for(model.decoder, cache, sampler_for(model, 0), None)
    record_pieces(runner, [32], 64, cuda_record() if device.type == "cuda" else lambda run: run)
    request = Request("prompt", tuple(range(5, 25)), SamplingParams(temperature=0))
    cache.attach(request)
    cache.grow(request, request.total)
    yield runner.forward(runner.pack(Batch((Slice(request, 0, request.total),)))).logits

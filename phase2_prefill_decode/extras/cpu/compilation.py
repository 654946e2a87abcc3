"""Compile the kernels of a model before it is used, on all cores, and say how far that is.

numba compiles a kernel at its first call, on one core and without a word. All kernels of a model take half a minute on
a fast machine and two on a slow one. numba has one lock for all that it compiles, so here each core has a process of
its own, and the results come through the cache.

How far it is: INFO records of this module's logger, and a bar on a terminal for callers that want one.
"""

import hashlib
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import NamedTuple

import numba
import torch
from torch import Tensor
from tqdm import tqdm

from phase0_request.support import entry
from phase0_request.support.machine import cores
from phase1_kv_pool.layer import HIGHEST, KVLayer, torch_dtype
from phase2_prefill_decode.decoder import Decoder
from phase2_prefill_decode.extras.cpu.attention import attend
from phase2_prefill_decode.extras.cpu.cache import PLACE, is_writable, not_kept
from phase2_prefill_decode.extras.cpu.draw import draw
from phase2_prefill_decode.extras.cpu.forward import forward_body
from phase2_prefill_decode.extras.cpu.intrinsics import PROCESSOR
from phase2_prefill_decode.extras.cpu.pointwise import add_norm, rotate_store, swiglu
from phase2_prefill_decode.extras.cpu.product import PackedWeight
from phase2_prefill_decode.extras.cpu.rows import INT6
from phase2_prefill_decode.extras.linears import every_product
from phase2_prefill_decode.kernels.attention import AttentionMetadata
from phase2_prefill_decode.kernels.draw import SamplingInputs

log = logging.getLogger(__name__)
PROCESSES = 3  # at most: attention alone takes a third of all


def _page(dtype: torch.dtype) -> KVLayer:
    page, scales = torch.zeros(1, 1, 16, 16, dtype=dtype), torch.zeros(1, 1, 16)
    return KVLayer(page, page, scales, scales) if dtype in HIGHEST else KVLayer(page, page)


def _attention(dtype: torch.dtype, _: torch.dtype, cached: torch.dtype) -> Tensor:
    length, query = torch.ones(1, dtype=torch.int32), torch.zeros(1, 1, 16, dtype=dtype)
    metadata = AttentionMetadata(torch.arange(2, dtype=torch.int32), length, torch.zeros_like(length)[None], 1, 1)
    return attend(query, _page(cached), metadata, 1.0, None, None)


def _rotation(dtype: torch.dtype, _: torch.dtype, cached: torch.dtype) -> Tensor:
    zero, angles = torch.zeros(1, dtype=torch.int64), torch.zeros(1, 8)
    return rotate_store(torch.zeros(1, 48, dtype=dtype), angles, angles, zero, zero, _page(cached), None, 1e-6)


def _pointwise(dtype: torch.dtype, *_: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    row = torch.zeros(1, 16, dtype=dtype)
    return *add_norm(row, row, row[0], 1e-6), swiglu(row)


def _product(dtype: torch.dtype, stored: torch.dtype, _: torch.dtype) -> tuple[Tensor, Tensor]:
    scales = None if stored == dtype else torch.ones(1, 1)
    numbers = torch.ones(1, 2, dtype=torch.int8) if stored == INT6 else torch.full((1, 2), 100.0).to(stored)
    weight = PackedWeight(numbers, scales=scales)
    return weight(torch.zeros(1, weight.inputs, dtype=dtype)), weight.rows(torch.zeros(1, dtype=torch.int64), dtype)


def _sampling(dtype: torch.dtype, *_: torch.dtype) -> tuple[Tensor, Tensor]:
    number, integer, key = torch.ones(1), torch.zeros(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int64)
    return draw(torch.zeros(1, 16, dtype=dtype), SamplingInputs(key, key, integer, number, number, number), 16)


# What compiles each, on tensors as small as can be: kernels are compiled for a dtype, not for sizes. The longest first.
# The second dtype is that of the weights, the third that of keys and values.
KERNELS: dict[str, Callable[[torch.dtype, torch.dtype, torch.dtype], object]] = {
    "attention": _attention,
    "forward": lambda dtype, _, cached: forward_body(dtype, cached),
    "product": _product,
    "sampling": _sampling,
    "rotation": _rotation,
    "pointwise": _pointwise,
}


class Kernel(NamedTuple):
    """One of KERNELS, in a dtype."""

    name: str
    dtype: str
    stored: str = ""  # the format of the weights, if it is another
    cached: str = ""  # the format of keys and values, if it is another

    def make(self) -> None:
        """Compile it in this process, or load it from the cache."""
        KERNELS[self.name](*(getattr(torch, name or self.dtype) for name in self[1:]))


def kernels_of(
    dtype: torch.dtype, forward: bool, stored: Iterable[torch.dtype] = (), cached: torch.dtype | None = None
) -> list[Kernel]:
    """The kernels of a model in this dtype, with weights in `stored` formats too, and keys and values in `cached`;
    `forward`: also the one call for a decode. Logits that are edited or masked are float32."""
    of_model = str(dtype).removeprefix("torch.")

    def named(name: str, weights: torch.dtype = dtype) -> Kernel:
        caches = dtype if cached is None or name not in ("attention", "rotation", "forward") else cached
        others = ("" if other == dtype else str(other).removeprefix("torch.") for other in (weights, caches))
        return Kernel(name, of_model, *others)

    kernels = [named(name) for name in KERNELS if name != "product" and (forward or name != "forward")]
    kernels += [named("product", weights) for weights in {dtype, *stored}]
    kernels += [] if dtype == torch.float32 else [Kernel("sampling", "float32")]
    return sorted(kernels, key=lambda kernel: [*KERNELS].index(kernel.name))


def compile_decoder(decoder: Decoder, kv_dtype: str | None = None, progress: bool = False) -> None:
    """Compile what a decoder needs, with keys and values in `kv_dtype` or its own dtype. Without this each kernel is at
    its first call, for seconds and without a message."""
    stored = {product.dtype for product in every_product(decoder) if isinstance(product, PackedWeight)}
    cached = None if kv_dtype is None else torch_dtype(kv_dtype)
    kernels = kernels_of(decoder.dtype, decoder.whole_step is not None, stored, cached)
    compile_kernels(kernels, progress=progress)


def compile_kernels(kernels: Sequence[Kernel], *, progress: bool = False) -> None:
    """Load these kernels; compile them first, unless that has been done on this machine. `progress` shows a bar."""
    mark, kept = _mark(kernels), is_writable()
    if not kept:
        not_kept("nothing can be written there")
    if not (kept and mark.exists()):
        words = "compiling kernels for this CPU, once" if kept else "compiling kernels for this CPU, in each process"
        with tqdm(total=len(kernels), desc=words, leave=False, disable=None if progress else True) as bar:
            made = _in_processes(kernels) if kept and cores() > 1 else _here(kernels)
            for number, kernel in enumerate(made, 1):
                log.info("%s, %d of %d done: %s", words, number, len(kernels), kernel.name)
                bar.update()
    for kernel in kernels:
        kernel.make()
    if kept and not not_kept.cache_info().currsize:
        with suppress(OSError):  # without the mark the bar is shown again
            mark.touch()


def _mark(kernels: Sequence[Kernel]) -> Path:
    """A file that is there if these kernels have been compiled for this processor."""
    state = repr((numba.__version__, PROCESSOR, sorted(kernels)))
    return PLACE / f"{hashlib.sha256(state.encode()).hexdigest()[:16]}.compiled"


def _here(kernels: Iterable[Kernel]) -> Iterator[Kernel]:
    """Compile in this process, and yield what is done."""
    for kernel in kernels:
        kernel.make()
        yield kernel


def _in_processes(kernels: Sequence[Kernel]) -> Iterator[Kernel]:
    """Compile in other processes, and yield what is done. What a process fails on is left to this one."""
    count = min(len(kernels), cores(), PROCESSES)
    end, pipe = os.pipe()
    with open(end) as done, ExitStack() as workers:
        with open(pipe, "wb") as output:
            for number in range(count):
                share = [":".join(kernel) for kernel in kernels[number::count]]
                command = [sys.executable, "-m", __name__, *share]
                worker = subprocess.Popen(command, stdout=output, stderr=subprocess.DEVNULL, env=entry.environment())
                workers.enter_context(worker)
                workers.callback(worker.kill)
        for line in done:
            yield Kernel(*line.strip().split(":"))


if __name__ == "__main__":  # such a process
    for argument in sys.argv[1:]:
        Kernel(*argument.split(":")).make()
        os.write(1, f"{argument}\n".encode())  # in one piece: others write to the same pipe

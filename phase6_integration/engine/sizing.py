"""Sizing: runs the largest step to measure an engine's memory, and computes how many KV pages fit beside it."""

import gc
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import replace
from itertools import chain
from pathlib import Path

import torch

from phase0_request.batch import Batch, Slice
from phase0_request.request import Request
from phase0_request.support.checks import ConfigError
from phase0_request.support.machine import give_back_freed_memory
from phase1_kv_pool.cache import PagedCache
from phase1_kv_pool.layout import KVLayout
from phase2_prefill_decode.connect import runner_for
from phase6_integration.engine.connect_engine import largest_params, sampling_kinds, scored_rows
from phase6_integration.engine.runners import Computing, RecordedSteps, make_runner
from phase6_integration.engine.warmup import DRAWS, attention_batches, long_step, sampling_batches, warmup_pages

MAX_BYTES_ON_CPU = 4 << 30  # of KV cache: a CPU takes minutes to fill that much


def profile(computing: Computing, tokens: int, running: int, context: int) -> int:
    """Run the largest step on dummy tokens: the whole budget, with as many requests sampling as can run, in the way
    that takes most memory, and beside them a block of prompt rows to score. On a GPU the step with most splits of long
    contexts may take more, in attention. Returns the peak memory of a step, without its pages.
    On a GPU, then compile every kernel variant that serving can launch."""
    model, sampler, layout = computing
    decoder, longest_prompt = model.decoder, model.config.max_position_embeddings
    on_gpu, page_size = decoder.device.type == "cuda", layout.page_size
    rows, scored_params = scored_rows()
    requests, block = min(tokens, running), min(tokens, rows, longest_prompt)
    length = min(tokens // requests, longest_prompt)
    pages = -(-length // page_size) * requests + -(-block // page_size)
    cache = PagedCache(max(pages, warmup_pages(page_size)) if on_gpu else pages, page_size)
    if not on_gpu:  # one layer of each kind: they use the same memory, one after the other
        decoder = copy(decoder)
        kinds = dict(zip(model.config.layers, decoder.layers, strict=True))
        decoder.config = replace(model.config, num_hidden_layers=len(kinds), layers=tuple(kinds))
        decoder.layers = [*kinds.values()]
    rows = max(requests + 1, len(DRAWS) + len(sampling_kinds()))  # fixed: memory that lasts is not that of a step
    runner = runner_for(decoder, cache, sampler, layout.dtype, (rows, cache.usage.total))
    params = largest_params()
    dummies = [Request(f"{number}", (0,) * length, params) for number in range(requests)]
    scored = [Request("scored", (0,) * (block + 1), scored_params)] if block else []

    def run(slices: Sequence[Slice]) -> None:
        for request, start, count, _ in slices:
            cache.grow(request, start + count)
        runner.run(runner.pack(Batch(tuple(slices))))

    def largest() -> None:
        for request in (*dummies, *scored):
            cache.attach(request)
        if length > 1:
            run([Slice(request, 0, length - 1) for request in dummies])
        run([*(Slice(r, length - 1, 1) for r in dummies), *(Slice(r, 0, block) for r in scored)])
        for request in (*dummies, *scored):
            cache.release(request)

    def longest() -> None:
        step = long_step(runner.state, requests, model.config, context)
        runner.forward(step)

    activations = peak_bytes(largest, decoder.device)
    if on_gpu:  # the kernels of a CPU were compiled when the model was loaded
        decoder.rope(context)
        activations = max(activations, peak_bytes(longest, decoder.device))
        for batch in chain(attention_batches(cache, longest_prompt), sampling_batches(cache)):
            runner.run(runner.pack(batch))
    return activations


def graph_bytes(computing: Computing, recorded: RecordedSteps, context: int) -> int:
    """The memory of recorded steps, measured by recording the two largest over a pool of one page. They share the
    memory of the largest; each further one takes as much as the second did. Pieces are measured in the same way."""
    sizes, counts = recorded
    if not sizes:
        return 0

    def taken(few: Sequence[int], pieces: Sequence[int]) -> int:
        before = unreserved_bytes()
        runner = make_runner(computing, PagedCache(1, computing.layout.page_size), context, RecordedSteps(few, pieces))
        bytes = before - unreserved_bytes()
        del runner
        gc.collect()
        return bytes

    taken(sizes[:1], counts[:1])  # what is allocated once for all graphs
    first = taken(sizes[-1:], counts[-1:])
    each = max(taken(sizes[-2:], counts[-1:]) - first, 0)
    piece = max(taken(sizes[-1:], counts[-2:]) - first, 0) if counts else 0
    return first + each * (len(sizes) - 1) + piece * max(len(counts) - 1, 0)


def unreserved_bytes() -> int:
    """The GPU memory that torch has not reserved. A recorded step's memory stays reserved."""
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]


# region pages_that_fit
def pages_that_fit(
    layouts: Sequence[KVLayout],
    device: torch.device,
    free: int | None,
    share: float,
    activations: int,
    max_tokens: int,
) -> int:
    """The number of KV pages that fit beside the weights and the activations; the pool of each layout has as many.
    `free` is the memory that is free beside the weights, in the process that has least. `share` is of the device's
    whole memory. On a CPU, with memory that other programs use too, it is of the free memory, and no more than
    `max_tokens` need."""
    page_bytes = sum(layout.bytes_per_page for layout in layouts)
    if free is None:
        raise ConfigError("this system does not report its free memory; set kv_cache_pages")
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        room = total * share - (total - free) - activations
    else:
        needed = -(-max_tokens // layouts[0].page_size) * page_bytes
        room = min(free * share - activations, MAX_BYTES_ON_CPU, needed)
    pages = int(room) // page_bytes
    if pages < 1:
        raise ConfigError(
            f"no memory is left for keys and values: {free / 1e9:.1f} GB are free beside the weights, and a step takes "
            f"{activations / 1e9:.1f} GB; use a smaller max_num_batched_tokens or a higher gpu_memory_utilization"
        )
    return pages


# endregion


def peak_bytes(work: Callable[[], None], device: torch.device) -> int:
    """The peak of newly allocated memory while `work` runs, measured by running it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        work()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    give_back_freed_memory()  # what `work` took of it would count as no memory at all
    before = _reset_peak()
    work()
    return max(_process_bytes("VmHWM:") - before, 0)


def _reset_peak() -> int:
    """Reset the process's peak memory. Return its memory now, or the old peak if it cannot be reset."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return _process_bytes("VmHWM:")
    return _process_bytes("VmRSS:")


def _process_bytes(name: str) -> int:
    file = Path("/proc/self/status")
    lines = file.read_text().splitlines() if file.exists() else []
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(name)), 0)

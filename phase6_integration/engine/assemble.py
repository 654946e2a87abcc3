"""Build an engine from its options: model, KV pool, cache, scheduler and runner, with a pool sized to the memory."""

import gc
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from copy import copy
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from pathlib import Path

import torch

from phase0_request.batch import Batch, Slice
from phase0_request.core import CoreObserver
from phase0_request.params import MAX_LOGPROBS, SamplingParams
from phase0_request.request import Request
from phase0_request.support.checks import ConfigError, check_extras, has_extras
from phase0_request.support.machine import give_back_freed_memory
from phase1_kv_pool.cache import PagedCache
from phase1_kv_pool.layout import KVLayout
from phase1_kv_pool.pool import KVPool
from phase2_prefill_decode.connect import quantization, sampler_for
from phase2_prefill_decode.model import Model, load_tokenizer
from phase2_prefill_decode.sampling.sampler import Sampler
from phase2_prefill_decode.step.device_state import DeviceState
from phase2_prefill_decode.step.graphs import batch_sizes, cuda_recorder
from phase2_prefill_decode.step.packed import PackedStep
from phase2_prefill_decode.step.runner import ModelRunner
from phase4_radix.prefix_cache import PrefixCache
from phase5_continuous.connect import turns
from phase5_continuous.policies import policy
from phase5_continuous.scheduler import Scheduler
from phase6_integration.engine.hub import directory_of
from phase6_integration.engine.isolation import IsolatingCore, IsolatingRunner, LoadShedding
from phase6_integration.engine.loop_hooks import Extra, LoopHooks
from phase6_integration.engine.options import EngineOptions
from phase6_integration.engine.warmup import attention_batches, long_step, sampling_batches, warmup_pages

log = logging.getLogger(__name__)
LARGEST = SamplingParams(logprobs=MAX_LOGPROBS, logit_bias={0: 1.0}, allowed_token_ids=(0,))  # copies of its logits
SPARE_ROWS, SPARE_ROWS_ON_GPU = 3, 64  # of a step; a few on a CPU, where a small model's weights are in its cache
MAX_BYTES_ON_CPU = 4 << 30  # of KV cache: a CPU takes minutes to fill that much
LONG = 4096  # tokens: on a CPU, requests up to this can all run at once; of longer ones, at least one


@dataclass(frozen=True, slots=True)
class Assembled:
    """The parts of an engine."""

    model: Model  # its config's max_position_embeddings is this engine's context length
    scheduler: Scheduler
    core: IsolatingCore[PackedStep]
    sampler: Sampler
    layout: KVLayout
    resources: ExitStack = field(default_factory=ExitStack)  # what is closed with the engine: processes and sockets


# region assemble
def assemble(options: EngineOptions, loaded: Model | None = None) -> Assembled:
    """Load the model unless it is given, profile the largest step, size the KV pool, and connect the parts."""
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    model = loaded or load_model(options)
    try:
        return connected(model, options)
    except BaseException:
        if loaded is None and model.decoder.processes is not None:
            model.decoder.processes.close()
        raise


def connected(model: Model, options: EngineOptions) -> Assembled:
    """The parts around a model."""
    device, on_gpu = model.decoder.device, model.decoder.device.type == "cuda"
    if on_gpu:
        torch.cuda.set_device(device)  # streams and events are those of the current device
    context = _wanted_context(options, model.config.max_position_embeddings)
    budget, running = options.budget(on_gpu, context), options.running(on_gpu)
    sampler = sampler_for(model, options.seed)
    models, samplers = [model], [sampler]
    speculation = None
    drafter = None
    if options.speculative_config is not None:
        check_extras("phase5_continuous", "speculative_config")
        from phase5_continuous.extras.speculation import draft_loading
        from phase5_continuous.extras.speculation.speculation import speculation_of

        speculation = speculation_of(options.speculative_config, SPARE_ROWS_ON_GPU if on_gpu else SPARE_ROWS)
        if speculation is not None and (drafter := speculation.draft_model) is not None:
            models.append(draft_loading.load_draft_model(drafter.model, model, options.kv_cache_dtype))
            samplers.append(draft_loading.sampler_of_drafts(sampler))
    layouts = [_layout(each, options) for each in models]
    sizes = batch_sizes(running) if on_gpu and not options.enforce_eager else []
    counts: Sequence[int] = ()
    if options.enable_piecewise_cuda_graph:
        if not on_gpu:
            raise ConfigError(f"enable_piecewise_cuda_graph is for a GPU, and the model is on {device}")
        check_extras("phase2_prefill_decode", "enable_piecewise_cuda_graph")
        from phase2_prefill_decode.extras.piecewise import token_counts

        counts = token_counts(budget.max_batched_tokens)
    activations = graphs = 0
    for each, layout in zip(models, layouts, strict=True):
        activations = max(activations, profile(each, sampler, budget.max_batched_tokens, running, layout, context))
        graphs += graph_bytes(each, sampler, sizes, counts, context, layout)
    needed = max(running * min(context, LONG), context)
    free = model.decoder.backend.free_bytes(device)
    pages = options.kv_cache_pages or pages_that_fit(
        layouts, device, free, options.gpu_memory_utilization, activations + graphs, needed
    )
    kind = PrefixCache if options.enable_prefix_caching else PagedCache
    caches = [kind(pages, options.page_size) for _ in models]
    scheduler = Scheduler(
        caches[0],
        model.eos_ids,
        budget,
        policy=policy(options.scheduling_policy),
        turns=turns(),
        max_running=running,
        ahead=options.ahead(on_gpu),
        extender=speculation,
    )
    context = _context_length(options, context, caches[0])
    runners = [
        make_runner(
            each,
            each.decoder.backend.kv_pool(layout, pages, device),
            cache,
            own,
            sizes,
            counts,
            context,
            ahead=scheduler.ahead > 0,
        )
        for each, layout, cache, own in zip(models, layouts, caches, samplers, strict=True)
    ]
    if drafter is not None:
        draft_loading.connect(drafter, runners[1], runners[0])
    isolating = IsolatingRunner(runners[0], LoadShedding(scheduler))
    core = IsolatingCore(scheduler, isolating, time.monotonic)
    shorter = replace(model, config=replace(model.config, max_position_embeddings=context))
    parts = Assembled(shorter, scheduler, core, sampler, layouts[0])
    core.observers += observers(parts, options)
    return parts


# endregion


def observers(parts: Assembled, options: EngineOptions) -> Iterator[CoreObserver]:
    """The extras that observe the steps, if they are wanted. What they hold is closed with the engine."""
    if (processes := parts.model.decoder.processes) is not None:
        parts.resources.callback(processes.close)
    if options.check_invariants:
        check_extras("phase5_continuous", "check_invariants")
        from phase5_continuous.extras.invariants import Checks

        yield Checks(parts.scheduler)
    if options.kv_events is not None and isinstance(cache := parts.scheduler.cache, PrefixCache):
        check_extras("phase6_integration", "kv_events_config")
        from phase6_integration.extras.kv_events.kv_events import KVEventPublisher

        yield (publisher := KVEventPublisher(cache, options.kv_events))
        parts.resources.callback(publisher.close)


def loop_extras(parts: Assembled, options: EngineOptions) -> list[Extra]:
    """The extras in the process of a server's engine: they work beside the steps, and answer the server's side. It
    trusts no grammar of a client, so these are followed in processes of their own."""
    extras: list[Extra] = []
    if (processes := parts.model.decoder.processes) is not None:
        extras.append(lambda *_: LoopHooks(descriptors=processes.filenos(), woken=processes.check))
    if not has_extras("phase6_integration"):
        return extras
    from phase6_integration.extras.page.recording import record
    from phase6_integration.extras.reports import reports
    from phase6_integration.extras.structured.isolated_grammars import IsolatedGrammars

    extras += [record, reports]
    if parts.model.tokenizer is not None:
        extras.append(IsolatedGrammars.install(parts.sampler, options).work)
    return extras


def _layout(model: Model, options: EngineOptions) -> KVLayout:
    dtype = options.kv_cache_dtype or str(model.decoder.dtype).removeprefix("torch.")
    return model.config.kv_layout(options.page_size, dtype)


def load_model(options: EngineOptions) -> Model:
    directory = directory_of(options.model, options.revision, options.download_dir)
    load, size = Model.load, options.tensor_parallel_size
    if size > 1:
        check_extras("phase2_prefill_decode", f"tensor_parallel_size={size}")
        from phase2_prefill_decode.extras.parallel.load import load_split

        timeout = options.hang_timeout / 2  # before this process itself counts as hung
        load = partial(load_split, size=size, collective_timeout=timeout)
    model = load(
        directory,
        device=options.device,
        dtype=options.dtype,
        transform=quantization(options.quantization, options.quantize_embeddings),
        kv_cache_dtype=options.kv_cache_dtype,
    )
    if options.tokenizer is None:
        return model
    named = directory_of(options.tokenizer, None, options.download_dir, "tokenizer")
    return replace(model, tokenizer=load_tokenizer(named, model.config))


def profile(model: Model, sampler: Sampler, tokens: int, running: int, layout: KVLayout, context: int) -> int:
    """Run the largest step on dummy tokens: the whole budget, with as many requests sampling as can run, in the way
    that takes most memory, and beside them a block of prompt rows to score. On a GPU the step with most splits of long
    contexts may take more, in attention. Returns the peak memory of a step, without its pages.
    On a GPU, then compile every kernel variant that serving can launch."""
    requests = min(tokens, running)
    length = min(tokens // requests, model.config.max_position_embeddings)
    block = min(tokens, scored_rows(), model.config.max_position_embeddings)
    on_gpu, page_size = model.decoder.device.type == "cuda", layout.page_size
    pages = -(-length // page_size) * requests + -(-block // page_size)
    pages = max(pages, warmup_pages(page_size)) if on_gpu else pages
    cache = PagedCache(pages, page_size)
    decoder = model.decoder
    if not on_gpu:  # one layer: all take the same memory, one after the other
        decoder = copy(decoder)
        decoder.layers = decoder.layers[:1]
    runner = ModelRunner(decoder, decoder.backend.kv_pool(layout, pages, decoder.device), cache, sampler)
    dummies = [Request(f"{number}", (0,) * length, LARGEST) for number in range(requests)]
    scored = [Request("scored", (0,) * (block + 1), SamplingParams(prompt_logprobs=MAX_LOGPROBS))] if block else []

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
        runner.compute(step, step.to(model.decoder.device))

    activations = peak_bytes(largest, decoder.device)
    if on_gpu:  # the kernels of a CPU were compiled when the model was loaded
        decoder.rope(context)
        activations = max(activations, peak_bytes(longest, decoder.device))
        for batch in chain(attention_batches(cache, model.config.max_position_embeddings), sampling_batches(cache)):
            runner.run(runner.pack(batch))
    return activations


def scored_rows() -> int:
    """How many rows of a prompt are scored at once, which an extra does."""
    if not has_extras("phase2_prefill_decode"):
        return 0
    from phase2_prefill_decode.extras.logprobs import BLOCK

    return BLOCK


def make_runner(
    model: Model,
    pool: KVPool,
    cache: PagedCache,
    sampler: Sampler,
    sizes: Sequence[int],
    counts: Sequence[int],
    context: int,
    ahead: bool = False,
) -> ModelRunner:
    """A runner with recorded decode steps of these sizes, and pieces of steps with so many tokens. Without any, it
    launches all steps kernel by kernel."""
    model.decoder.rope(context)  # the tables are built now, not in the middle of a step
    if not sizes:
        return ModelRunner(model.decoder, pool, cache, sampler, ahead=ahead)
    rows = 2 * max(sizes)  # as many may have ended in flight as run
    state = DeviceState(pool.device, rows, -(-context // cache.page_size))
    runner = ModelRunner(model.decoder, pool, cache, sampler, state, ahead=ahead)
    record = cuda_recorder()
    if counts:
        from phase2_prefill_decode.extras.piecewise import record_pieces

        record_pieces(runner, counts, context, record)
    runner.record(sizes, context, record)
    return runner


def graph_bytes(
    model: Model, sampler: Sampler, sizes: Sequence[int], counts: Sequence[int], context: int, layout: KVLayout
) -> int:
    """The memory of recorded steps, measured by recording the two largest over a pool of one page. They share what the
    largest needs; each further one takes what the second took. The same of pieces."""
    if not sizes:
        return 0

    def taken(few: Sequence[int], pieces: Sequence[int]) -> int:
        before = unreserved_bytes()
        pool = model.decoder.backend.kv_pool(layout, 1, model.decoder.device)
        runner = make_runner(model, pool, PagedCache(1, layout.page_size), sampler, few, pieces, context)
        bytes = before - unreserved_bytes()
        del runner, pool
        gc.collect()
        return bytes

    taken(sizes[:1], counts[:1])  # what is allocated once for all graphs
    first = taken(sizes[-1:], counts[-1:])
    each = max(taken(sizes[-2:], counts[-1:]) - first, 0)
    piece = max(taken(sizes[-1:], counts[-2:]) - first, 0) if counts else 0
    return first + each * (len(sizes) - 1) + piece * max(len(counts) - 1, 0)


def unreserved_bytes() -> int:
    """The memory of the GPU that torch has not reserved. What a recorded step needs stays reserved for it."""
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
    """The number of KV pages that fit beside the weights and the activations: a pool of each layout has so many.
    `free` is what is free beside the weights, of all ranks the least. `share` is of the device's whole memory. On a
    CPU, with memory that other programs use too, it is of the free memory, and no more than `max_tokens` need."""
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
    """The peak memory of `work` beyond what was allocated before it, measured by running it."""
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
    """Reset the process's peak memory; return its memory now, or its old peak where that cannot be reset."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return _process_bytes("VmHWM:")
    return _process_bytes("VmRSS:")


def _process_bytes(name: str) -> int:
    file = Path("/proc/self/status")
    lines = file.read_text().splitlines() if file.exists() else []
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(name)), 0)


def _wanted_context(options: EngineOptions, claimed: int) -> int:
    """The context length to serve of a model that claims so many tokens, if the pool has room for it."""
    context = options.context(claimed)
    if context > claimed:
        raise ConfigError(f"max_model_len must be at most {claimed}, this model's context; got {context}")
    if context < claimed and options.max_model_len is None:
        log.warning("of the model's context of %d tokens, %d are served; --max-model-len serves more", claimed, context)
    return context


def _context_length(options: EngineOptions, wanted: int, cache: PagedCache) -> int:
    """The longest request: limited by the model, by max_model_len, and by the whole pool."""
    if wanted <= cache.max_tokens:
        return wanted
    if options.max_model_len is not None:
        raise ConfigError(
            f"max_model_len is {wanted} tokens, and the cache has room for {cache.max_tokens}: lower the one, or raise "
            "kv_cache_pages or gpu_memory_utilization"
        )
    return cache.max_tokens

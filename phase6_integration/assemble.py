"""From options to an engine: the model of phase 2 with phase 3's attention, the pool of phase 1, the cache of phase 4,
the scheduler and the loop of phase 5. Each part is told what it needs, here and nowhere else."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from phase0_request.batch import Batch, Slice
from phase0_request.request import Request
from phase1_kv_pool.cache import KVCache, PagedCache
from phase1_kv_pool.pool import KVPool
from phase2_prefill_decode.fields import ConfigError
from phase2_prefill_decode.model import Model, default_device
from phase2_prefill_decode.runner import ModelRunner, PackedStep
from phase2_prefill_decode.sampler import Sampler
from phase3_chunked_prefill.engine import load
from phase4_radix.prefix_cache import PrefixCache
from phase5_continuous.deadlines import Deadlines
from phase5_continuous.policies import policy
from phase5_continuous.scheduler import Scheduler
from phase6_integration.hub import directory_of
from phase6_integration.isolation import Attempt, IsolatingRunner
from phase6_integration.options import EngineOptions
from phase6_integration.sizing import pages_that_fit, peak_bytes
from phase6_integration.stats import CountedCore


@dataclass(frozen=True, slots=True)
class Assembled:
    """An engine in its parts."""

    model: Model  # its config says how long a request may become here
    scheduler: Scheduler
    core: CountedCore[Attempt[PackedStep]]


# region assemble
def assemble(
    options: EngineOptions, given: Model | None = None, *, clock: Callable[[], float] = time.monotonic
) -> Assembled:
    """Load the model unless it is given, measure a step, size the pool, put the parts together."""
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    model = given or load_model(options)
    device, on_gpu = model.decoder.device, model.decoder.device.type == "cuda"
    wanted = options.max_model_len or model.config.max_position_embeddings
    if wanted > model.config.max_position_embeddings:
        raise ConfigError(
            f"max_model_len must be at most {model.config.max_position_embeddings}, this model's context; got {wanted}"
        )
    budget, running = options.budget(on_gpu, wanted), options.running(on_gpu)
    sampler = Sampler.of(model, options.seed)
    activations = peak_bytes(lambda: largest_step(model, sampler, budget.max_batched_tokens, running), device)
    layout = model.config.kv_layout(options.page_size, str(model.decoder.dtype).removeprefix("torch."))
    pages = options.kv_cache_pages or pages_that_fit(
        layout, device, options.gpu_memory_utilization, activations, useful_tokens=running * wanted
    )
    pool = room_for(model, pages, options.page_size)
    kind = PrefixCache if options.enable_prefix_caching else PagedCache
    cache = kind(pages, options.page_size)
    scheduler = Scheduler(
        cache,
        model.eos_ids,
        budget,
        policy=policy(options.scheduling_policy),
        max_running=running,
        deadlines=Deadlines(total=options.request_timeout),
    )
    runner = IsolatingRunner(ModelRunner(model.decoder, pool, cache, sampler), cache)
    model = replace(model, config=replace(model.config, max_position_embeddings=_context(options, wanted, cache)))
    return Assembled(model, scheduler, CountedCore(scheduler, runner, clock, check=options.check_invariants))


# endregion


def load_model(options: EngineOptions) -> Model:
    place = default_device() if options.device is None else torch.device(options.device)
    return load(directory_of(options.model), device=place, dtype=options.dtype)


def largest_step(model: Model, sampler: Sampler, tokens: int, running: int) -> None:
    """As many tokens as a step may have, as many requests that each want one drawn. It also makes the kernels ready."""
    many = min(tokens, running)
    each = min(tokens // many, model.config.max_position_embeddings)
    page = 16
    cache = PagedCache(-(-each // page) * many, page)
    runner = ModelRunner(model.decoder, room_for(model, cache.usage.total, page), cache, sampler)
    requests = [Request(f"{number}", (0,) * each) for number in range(many)]
    for start, length in ((0, each - 1), (each - 1, 1)) if each > 1 else ((0, 1),):
        for request in requests:
            if not start:
                cache.attach(request)
            cache.grow(request, start + length)
        runner.run(runner.pack(Batch(tuple(Slice(request, start, length) for request in requests))))


def room_for(model: Model, pages: int, page_size: int) -> KVPool:
    """The pool, with its memory really there: what is missing is better missed now than in the middle of a request."""
    decoder = model.decoder
    pool = KVPool(model.config.kv_layout(page_size), pages, decoder.device, decoder.dtype)
    if decoder.device.type == "cpu":
        for tensor in (*pool.keys, *pool.values):
            tensor.zero_()
    return pool


def _context(options: EngineOptions, wanted: int, cache: KVCache) -> int:
    """The longest a request may become: it has to fit into the pool alone."""
    if wanted <= cache.max_tokens:
        return wanted
    if options.max_model_len is not None:
        raise ConfigError(
            f"max_model_len is {wanted} tokens, and the cache has room for {cache.max_tokens}: lower the one, or raise "
            "kv_cache_pages or gpu_memory_utilization"
        )
    return cache.max_tokens

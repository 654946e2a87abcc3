"""Build an engine from its options: model, KV pool, cache, scheduler and runner, with a pool sized to the memory."""

import logging
import time
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch

from phase0_request.support.checks import ConfigError
from phase1_kv_pool.cache import PagedCache
from phase1_kv_pool.layout import KVLayout
from phase2_prefill_decode.model import Model, load_tokenizer, sampler_for
from phase2_prefill_decode.sampling.sampler import Sampler
from phase2_prefill_decode.step.graphs import batch_sizes
from phase2_prefill_decode.step.packed import PackedStep
from phase5_continuous.connect import turns
from phase5_continuous.policies import policy
from phase5_continuous.scheduler import Scheduler
from phase6_integration.engine import connect_engine as extras
from phase6_integration.engine.hub import directory_of
from phase6_integration.engine.isolation import IsolatingCore, IsolatingRunner, LoadShedding
from phase6_integration.engine.options import EngineOptions
from phase6_integration.engine.runners import Computing, RecordedSteps, make_runner
from phase6_integration.engine.sizing import graph_bytes, pages_that_fit, profile

log = logging.getLogger(__name__)
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
    """Connect the parts around a model."""
    device, on_gpu = model.decoder.device, model.decoder.device.type == "cuda"
    if on_gpu:
        torch.cuda.set_device(device)  # streams and events are those of the current device
    context = wanted_context(options, model.config.max_position_embeddings)
    model = extras.for_context(model, context)
    budget, running = options.budget(on_gpu, context), options.running(on_gpu)
    sampler = sampler_for(model, options.seed)
    extender, companions = extras.extender_for(model, sampler, options, partial(find, options))
    computing = [Computing(*one, layout_of(one[0], options)) for one in ((model, sampler), *companions)]
    recorded = steps_to_record(options, device, running, budget.max_batched_tokens)

    activations = max(profile(one, budget.max_batched_tokens, running, context) for one in computing)
    activations += sum(graph_bytes(one, recorded, context) for one in computing)
    states = extras.state_bytes(model, options, 2 * running if on_gpu else running)
    activations += 0 if recorded.sizes else states  # recorded steps were measured with theirs
    ahead = options.ahead(on_gpu and extender is None)
    in_flight = budget.max_chunk_size * (1 + ahead)
    layouts = [extras.kv_layout(one.layout, model, options, in_flight, context) for one in computing]
    longest = max(running * layouts[0].pages_for(min(context, LONG)), layouts[0].pages_for(context))
    pages = options.kv_cache_pages or pages_that_fit(
        layouts,
        device,
        model.decoder.backend.free_bytes(device),
        options.gpu_memory_utilization,
        activations,
        longest * options.page_size,
    )
    caches = [extras.cache_for(layout, pages, options.enable_prefix_caching) for layout in layouts]
    context = context_length(options, context, caches[0])

    scheduler = Scheduler(
        caches[0],
        model.eos_ids,
        budget,
        policy=policy(options.scheduling_policy),
        turns=turns(),
        max_running=running,
        ahead=ahead,
        extender=extender,
    )
    runner, *others = (
        make_runner(one, cache, context, recorded, ahead=ahead > 0)
        for one, cache in zip(computing, caches, strict=True)
    )
    extras.connect_companions(extender, runner, others)
    core = IsolatingCore(scheduler, IsolatingRunner(runner, LoadShedding(scheduler)), time.monotonic)
    served = replace(model, config=replace(model.config, max_position_embeddings=context))
    parts = Assembled(served, scheduler, core, sampler, layouts[0])
    if model.decoder.processes is not None:
        parts.resources.callback(model.decoder.processes.close)
    core.observers += extras.observers(scheduler, options, parts.resources)
    return parts


# endregion


def find(options: EngineOptions, model: str, what: str) -> Path:
    """Find the directory of another model that an engine needs."""
    return directory_of(model, None, options.download_dir, what)


def load_model(options: EngineOptions) -> Model:
    model = extras.loader(options)(
        directory_of(options.model, options.revision, options.download_dir),
        device=options.device,
        dtype=options.dtype,
        kv_cache_dtype=options.kv_cache_dtype,
    )
    if options.tokenizer is None:
        return model
    tokenizer = load_tokenizer(find(options, options.tokenizer, "tokenizer"), model.config)
    return replace(model, tokenizer=tokenizer)


def layout_of(model: Model, options: EngineOptions) -> KVLayout:
    return model.config.kv_layout(options.page_size, options.kv_cache_dtype)


def steps_to_record(options: EngineOptions, device: torch.device, running: int, tokens: int) -> RecordedSteps:
    """The steps that a GPU records; none on a CPU."""
    sizes = batch_sizes(running) if device.type == "cuda" and not options.enforce_eager else []
    return RecordedSteps(sizes, extras.piece_counts(options, device, tokens))


def wanted_context(options: EngineOptions, claimed: int) -> int:
    """The context length to serve, given the model's own, if the pool has room for it."""
    context = options.context(claimed)
    if context > claimed:
        raise ConfigError(f"max_model_len must be at most {claimed}, this model's context; got {context}")
    if context < claimed and options.max_model_len is None:
        log.warning("of the model's context of %d tokens, %d are served; --max-model-len serves more", claimed, context)
    return context


def context_length(options: EngineOptions, wanted: int, cache: PagedCache) -> int:
    """The longest request: limited by the model, by max_model_len, and by the whole pool."""
    if wanted <= cache.max_tokens:
        return wanted
    if options.max_model_len is not None:
        raise ConfigError(
            f"max_model_len is {wanted} tokens, and the cache has room for {cache.max_tokens}: lower the one, or raise "
            "kv_cache_pages or gpu_memory_utilization"
        )
    return cache.max_tokens

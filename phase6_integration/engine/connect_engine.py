"""Connects the extras of all phases to the engine of a server or of this process, if they are installed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from phase0_request.params import MAX_LOGPROBS, SamplingParams
from phase0_request.support.checks import ConfigError, has_extras
from phase0_request.support.options import joined
from phase1_kv_pool.cache import PagedCache
from phase2_prefill_decode.connect import check_split
from phase4_radix.prefix_cache import PrefixCache
from phase6_integration.engine.options import EngineOptions

if TYPE_CHECKING:  # a server reads options without torch
    from contextlib import ExitStack
    from pathlib import Path

    import torch

    from phase0_request.core import CoreObserver
    from phase1_kv_pool.layout import KVLayout
    from phase1_kv_pool.pool import KVPool
    from phase2_prefill_decode.loading.config import ModelConfig
    from phase2_prefill_decode.model import Model
    from phase2_prefill_decode.sampling.sampler import Sampler
    from phase2_prefill_decode.step.runner import ModelRunner
    from phase5_continuous.scheduler import Extender, Scheduler
    from phase6_integration.engine.loop_hooks import Extra
    from phase6_integration.engine.stats import Gauges

log = logging.getLogger(__name__)
ONE, TWO, FIVE, SIX = "phase1_kv_pool", "phase2_prefill_decode", "phase5_continuous", "phase6_integration"
SPARE_ROWS, SPARE_ROWS_ON_GPU = 3, 64  # of a step; a few on a CPU, where a small model's weights are in its cache
Companions = Sequence[tuple["Model", "Sampler"]]


def absent() -> str | None:
    """The extras that are not installed."""
    return ", ".join(f"{phase}/extras" for phase in (TWO, FIVE, SIX) if not has_extras(phase)) or None


# Options.


def extra_options() -> list[type]:
    """The option dataclasses of the installed extras."""
    kinds: list[type] = []
    if has_extras(TWO):
        from phase2_prefill_decode.extras import options as two

        kinds += [two.QuantizationOptions, two.ParallelOptions, two.PiecewiseOptions, two.WindowOptions]
    if has_extras(FIVE):
        from phase5_continuous.extras.options import InvariantOptions, SpeculationOptions

        kinds += [SpeculationOptions, InvariantOptions]
    if has_extras(SIX):
        from phase6_integration.extras.kv_events.kv_events_options import KVEventsOptions

        kinds.append(KVEventsOptions)
    return kinds


def engine_options(**given: Any) -> EngineOptions:
    """The options of an engine and its extras, by name. ValueError if one is wrong or two conflict."""
    options = joined(EngineOptions, extra_options(), given)
    more, size = options.more, options.more.get("tensor_parallel_size", 1)
    if size > 1 and options.device is not None and ":" in options.device:
        raise ConfigError(
            f"tensor_parallel_size={size} takes the first GPUs: device must be cuda or cpu, got {options.device}"
        )
    if more.get("enable_piecewise_cuda_graph") and (options.enforce_eager or size > 1):
        raise ConfigError(
            "enable_piecewise_cuda_graph records steps, of a model on one device: it goes neither with enforce_eager "
            "nor with tensor_parallel_size"
        )
    if more.get("kv_events_config") is not None and not options.enable_prefix_caching:
        raise ConfigError("kv_events_config is for prefix caching, which enable_prefix_caching=False turns off")
    if more.get("speculative_config") is not None and options.async_scheduling:
        raise ConfigError("async_scheduling launches a step before the tokens are known that a draft would follow")
    return options


# The model.


def processes_for(config: ModelConfig, options: EngineOptions) -> int:
    """The number of processes that compute a model together. ConfigError if it cannot be split over them."""
    size = int(options.more.get("tensor_parallel_size", 1))
    check_split(config, size)
    return size


def loader(options: EngineOptions) -> Callable[..., Model]:
    """The function that loads the model."""
    from phase2_prefill_decode.connect import quantization
    from phase2_prefill_decode.model import Model

    if not has_extras(TWO):
        return Model.load
    from phase2_prefill_decode.extras.options import ParallelOptions, QuantizationOptions

    quantized, size = options.of(QuantizationOptions), options.of(ParallelOptions).tensor_parallel_size
    load: Callable[..., Model] = Model.load
    if size > 1:
        from phase2_prefill_decode.extras.parallel.load import load_split

        timeout = options.hang_timeout / 2  # before this process itself counts as hung
        load = partial(load_split, size=size, collective_timeout=timeout)
    return partial(load, transform=quantization(quantized.quantization, quantized.quantize_embeddings))


def for_context(model: Model, context: int) -> Model:
    """The model for sequences of up to `context` tokens."""
    if not has_extras(TWO):
        return model
    from phase2_prefill_decode.extras.families.dense import longrope

    return longrope.for_context(model, context)


# Steps.


def state_bytes(model: Model, options: EngineOptions, rows: int) -> int:
    """The memory of the states of this many requests, if layers of the model keep any. ConfigError for an option that
    does not work with them."""
    if not has_extras(TWO):
        return 0
    from phase2_prefill_decode.extras.families.stateful import check_stateless, state_bytes

    if not (one := state_bytes(model.config)):
        return 0
    if options.more.get("kv_events_config") is not None:
        check_stateless(model.config, "kv_events_config")
    log.info("a request's states take %.2f MB; there is memory for %d, see --max-num-seqs", one / 1e6, rows)
    return one * rows


def extender_for(
    model: Model, sampler: Sampler, options: EngineOptions, find: Callable[[str, str], Path]
) -> tuple[Extender | None, Companions]:
    """The extender of the slices of steps, and the models that it needs beside the engine's, with their samplers.
    `find` returns the directory of a model, by its name and role."""
    config = options.more.get("speculative_config")
    if config is None:
        return None, ()
    from phase2_prefill_decode.extras.families.stateful import check_stateless
    from phase5_continuous.extras.speculation import draft_loading
    from phase5_continuous.extras.speculation.speculation import speculation_of

    check_stateless(model.config, "speculative_config")
    if "model" in config:
        config = {**config, "model": str(find(config["model"], "draft model"))}
    spare = SPARE_ROWS_ON_GPU if model.decoder.device.type == "cuda" else SPARE_ROWS
    extender = speculation_of(config, spare)
    if extender is None or (drafter := extender.draft_model) is None:
        return extender, ()
    draft = draft_loading.load_draft_model(drafter.model, model, options.kv_cache_dtype)
    return extender, [(draft, draft_loading.sampler_of_drafts(sampler))]


def connect_companions(extender: Extender | None, runner: ModelRunner, others: Sequence[ModelRunner]) -> None:
    """Let an extender run its own models beside the engine's."""
    if others:
        from phase5_continuous.extras.speculation import draft_loading
        from phase5_continuous.extras.speculation.speculation import Speculation

        (own,) = others
        assert isinstance(extender, Speculation)
        assert extender.draft_model is not None
        draft_loading.connect(extender.draft_model, own, runner)


def piece_counts(options: EngineOptions, device: torch.device, tokens: int) -> Sequence[int]:
    """The token counts of the steps with prompts to record in pieces; none unless that is wanted."""
    if not options.more.get("enable_piecewise_cuda_graph"):
        return ()
    if device.type != "cuda":
        raise ConfigError(f"enable_piecewise_cuda_graph is for a GPU, and the model is on {device}")
    from phase2_prefill_decode.extras.piecewise import token_counts

    return token_counts(tokens)


def kv_layout(layout: KVLayout, model: Model, options: EngineOptions, in_flight: int, context: int) -> KVLayout:
    """The layout of a pool; `in_flight` tokens of a request may be computed before a commit frees pages."""
    if not has_extras(TWO):
        return layout
    from phase2_prefill_decode.extras.windows import layout_for

    known = {"enable_prefix_caching": options.enable_prefix_caching, **options.more}
    return layout_for(layout, model.decoder, known, in_flight, context)


def cache_for(layout: KVLayout, pages: int, shares: bool) -> PagedCache:
    """The cache of a pool with this layout; with `shares`, a prefix cache."""
    if not has_extras(TWO):
        return (PrefixCache if shares else PagedCache)(pages, layout.page_size)
    from phase1_kv_pool.extras.checkpoints import CheckpointedLayout
    from phase4_radix.extras import windows

    if isinstance(layout, CheckpointedLayout):
        slots, page_bytes = layout.slots_for(pages), layout.page_size * layout.bytes_per_token
        sizes = slots, slots * layout.state_bytes / 1e6, pages * page_bytes / 1e6
        log.info("the prefix cache has %d checkpoints of states in %.1f MB, beside %.1f MB of pages", *sizes)
    return windows.cache_for(layout, pages, shares)


def touch(pool: KVPool) -> None:
    """Touch the memory of a pool on a CPU before the first request, as much as the start can wait for."""
    if has_extras(ONE) and pool.device.type == "cpu":
        import torch

        from phase1_kv_pool.extras import touched

        tensors = sorted({(tensor.data_ptr(), tensor.nbytes) for tensor in pool.tensors})
        given, size = touched.touch(tensors, torch.get_num_threads()), sum(size for _, size in tensors)
        log.info("%d of %d MB of the KV cache are in memory; the rest comes when written", given >> 20, size >> 20)


def record_pieces(runner: ModelRunner, counts: Sequence[int], context: int, record: Any) -> None:
    if counts:
        from phase2_prefill_decode.extras import piecewise

        piecewise.record_pieces(runner, counts, context, record)


# What a step of requests that ask for extras takes: memory, and kernels of its own.


def largest_params() -> SamplingParams:
    """The parameters that copy a row's logits most often."""
    if not has_extras(TWO):
        return SamplingParams()
    return SamplingParams(logprobs=MAX_LOGPROBS, logit_bias={0: 1.0}, allowed_token_ids=(0,))


def scored_rows() -> tuple[int, SamplingParams]:
    """How many rows of a prompt are scored at once, and with which parameters."""
    if not has_extras(TWO):
        return 0, SamplingParams()
    from phase2_prefill_decode.extras.logprobs import BLOCK

    return BLOCK, SamplingParams(prompt_logprobs=MAX_LOGPROBS)


def sampling_kinds() -> Sequence[SamplingParams]:
    """Parameters for which extras launch kernels of their own."""
    if not has_extras(TWO):
        return ()
    return (
        SamplingParams(repetition_penalty=1.1, frequency_penalty=0.1, logit_bias={0: 1.0}),
        SamplingParams(allowed_token_ids=(0,)),
        SamplingParams(allowed_token_ids=(0,), logit_bias={0: 1.0}),
        SamplingParams(logprobs=1, prompt_logprobs=1),
    )


def default_names() -> Sequence[str]:
    """Fields of a generation_config.json that extras take into account."""
    return ("repetition_penalty",) if has_extras(TWO) else ()


# Beside the steps.


def extra_totals(gauges: Gauges) -> dict[str, int]:
    """The extras' part of the statistics of an engine in this process."""
    return {"draft_tokens": gauges.beyond, "accepted_tokens": sum(gauges.kept)}


def observers(scheduler: Scheduler, options: EngineOptions, resources: ExitStack) -> Iterator[CoreObserver]:
    """The extras that observe the steps, if they are wanted. They close with the `resources`."""
    if options.more.get("check_invariants"):
        from phase5_continuous.extras.invariants import Checks

        yield Checks(scheduler)
    if has_extras(SIX) and isinstance(cache := scheduler.cache, PrefixCache):
        from phase6_integration.extras.kv_events.kv_events_options import KVEventsOptions

        if (config := options.of(KVEventsOptions).kv_events) is not None:
            from phase6_integration.extras.kv_events.kv_events import KVEventPublisher

            yield (publisher := KVEventPublisher(cache, config))
            resources.callback(publisher.close)


def loop_extras(model: Model, sampler: Sampler, options: EngineOptions) -> list[Extra]:
    """The extras in the process of a server's engine: they work beside the steps, and answer the server's side. It
    trusts no grammar of a client, so these are followed in a process of their own."""
    from phase6_integration.engine.loop_hooks import LoopHooks

    extras: list[Extra] = []
    if (processes := model.decoder.processes) is not None:
        extras.append(lambda *_: LoopHooks(descriptors=processes.filenos(), woken=processes.check))
    if not has_extras(SIX):
        return extras
    from phase6_integration.extras.page.recording import record
    from phase6_integration.extras.reports import reports
    from phase6_integration.extras.structured.isolated_grammars import IsolatedGrammars

    extras += [record, reports]
    if model.tokenizer is not None:
        extras.append(IsolatedGrammars.install(sampler, options).work)
    return extras

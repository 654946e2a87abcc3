"""Loading draft models: a model that fits its target is connected to a runner, and the time of its steps is
measured."""

import time
from pathlib import Path

from phase0_request.batch import Batch, Slice
from phase0_request.request import Request
from phase0_request.support.checks import ConfigError
from phase1_kv_pool.extras.windows import WindowedCache
from phase2_prefill_decode.connect import runner_for
from phase2_prefill_decode.engine import Engine
from phase2_prefill_decode.extras.families.stateful import check_stateless
from phase2_prefill_decode.extras.penalties import Penalties
from phase2_prefill_decode.model import Model
from phase2_prefill_decode.sampling.sampler import Sampler
from phase2_prefill_decode.step.runner import ModelRunner
from phase5_continuous.extras.speculation.draft_model import DraftModel
from phase5_continuous.extras.speculation.speculation import Speculation
from phase5_continuous.scheduler import Extender, Scheduler


def load_draft_model(directory: str | Path, model: Model, kv_cache_dtype: str | None = None) -> Model:
    """Load a draft model for a model, in its dtype and on its device. ConfigError if their tokens differ."""
    dtype, device = model.config.dtype, model.decoder.device
    draft = Model.load(directory, device=device, dtype=dtype, kv_cache_dtype=kv_cache_dtype)
    check_stateless(draft.config, "a draft model")
    sizes = draft.config.vocab_size, model.config.vocab_size
    if sizes[0] != sizes[1]:
        raise ConfigError(
            f"the draft model must have the vocabulary of the model, {sizes[1]} tokens; {directory} has {sizes[0]}"
        )
    if draft.tokenizer is not None and model.tokenizer is not None:
        differ = draft.tokenizer.vocabulary.items() ^ model.tokenizer.vocabulary.items()
        if differ:
            token, text = min((token, text) for text, token in differ)
            own = "the draft model must have the tokenizer of the model"
            raise ConfigError(f"{own}; token {token} of {directory} is another: {text!r}")
    return draft


def drafter_for(extender: Extender, engine: Engine[Scheduler]) -> None:
    """Load the draft model of an engine's speculation, if there is one, with a cache of the same size."""
    check_stateless(engine.model.config, "speculative_config")
    drafter = extender.draft_model if isinstance(extender, Speculation) else None
    if drafter is None:
        return
    runner, cache = engine.core.runner, engine.core.scheduler.cache
    assert isinstance(runner, ModelRunner)
    if isinstance(cache, WindowedCache):
        raise ConfigError("a draft model has one page table for all layers, and so must the cache of its target")
    draft = load_draft_model(drafter.model, engine.model)
    own = type(cache)(cache.usage.total, cache.page_size)
    connect(drafter, runner_for(draft.decoder, own, sampler_of_drafts(runner.sampler)), runner)


def connect(drafter: DraftModel, runner: ModelRunner, other: ModelRunner) -> None:
    """Let a draft model run on its runner, once it is known what its steps cost beside the other model's."""
    cost, context = step_seconds(runner) / step_seconds(other), runner.decoder.config.max_position_embeddings
    drafter.connect(runner, runner.cache, cost, context)


def sampler_of_drafts(sampler: Sampler) -> Sampler:
    """A draft model's sampler, with the target's noise, filters, bias and penalties. Masks are left to the target."""
    return sampler.limited([each for each in sampler.processors if isinstance(each, Penalties)])


def step_seconds(runner: ModelRunner) -> float:
    """The time of a decode of one request: the fastest of a few."""
    request, cache, seconds = Request("timed", (0, 0)), runner.cache, list[float]()
    cache.attach(request)
    cache.grow(request, request.total)
    for part in (Slice(request, 0, 2), *[Slice(request, 1, 1)] * 10):
        began = time.perf_counter()
        runner.run(runner.pack(Batch((part,))))
        seconds.append(time.perf_counter() - began)
    cache.release(request)
    return min(seconds)

"""The engine of this phase: phase 4's, with another scheduler. The batch changes at every step."""

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from phase0_request.batch import Batch, Slice
from phase0_request.checks import ConfigError
from phase0_request.request import Request
from phase1_kv_pool.cache import PagedCache
from phase2_prefill_decode.engine import Engine
from phase2_prefill_decode.loading.model import Model
from phase2_prefill_decode.step.runner import ModelRunner
from phase3_chunked_prefill.budget import TokenBudget
from phase4_radix.prefix_cache import PrefixCache
from phase5_continuous.policies import Policy
from phase5_continuous.scheduler import Scheduler
from phase5_continuous.speculation.draft_model import DraftModel
from phase5_continuous.speculation.speculation import speculation_of


def continuous(
    model: Model,
    budget: TokenBudget | None = None,
    *,
    cache: PagedCache | None = None,
    policy: Policy | None = None,
    max_running: int = 64,
    ahead: int = 0,
    speculative_config: Mapping[str, Any] | None = None,
    seed: int | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Engine[Scheduler]:
    """Make an engine with continuous batching. `cache` is by default a prefix cache of 512 pages of 16 tokens; `seed`
    is for requests without one."""
    cache = cache or PrefixCache(512, 16)
    speculation = speculation_of(speculative_config)
    scheduler = Scheduler(
        cache, model.eos_ids, budget, policy=policy, max_running=max_running, ahead=ahead, speculation=speculation
    )
    engine = Engine.of(model, scheduler, seed, clock)
    if speculation is not None and (drafter := speculation.draft_model) is not None:
        draft, runner = load_draft_model(drafter.model, model), engine.core.runner
        assert isinstance(runner, ModelRunner)
        layout = draft.config.kv_layout(cache.page_size, draft.config.dtype)
        pages = cache.max_tokens // cache.page_size
        pool, own = draft.decoder.kv_pool(layout, pages), type(cache)(pages, cache.page_size)
        connect(drafter, ModelRunner(draft.decoder, pool, own, runner.sampler.for_drafts()), runner)
    return engine


def load_draft_model(directory: str | Path, model: Model, kv_cache_dtype: str | None = None) -> Model:
    """Load a draft model for a model, in its dtype and on its device. ConfigError if their tokens differ."""
    dtype, device = model.config.dtype, model.decoder.device
    draft = Model.load(directory, device=device, dtype=dtype, kv_cache_dtype=kv_cache_dtype)
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


def connect(drafter: DraftModel, runner: ModelRunner, other: ModelRunner) -> None:
    """Let a draft model run on its runner, once it is known what its steps cost beside those of the other model's."""
    cost, context = step_seconds(runner) / step_seconds(other), runner.decoder.config.max_position_embeddings
    drafter.connect(runner, runner.cache, cost, context)


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

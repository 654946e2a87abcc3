"""Prompt logprobs are those of transformers: of whole prompts, chunks, cached prefixes and after preemptions."""

from pathlib import Path
from typing import Any

import pytest
import torch

from phase0_request import FinishReason, Request, SamplingParams
from phase0_request.core import EngineCore
from phase1_kv_pool import PagedCache
from phase2_prefill_decode.engine import static
from phase2_prefill_decode.extras.outcome import extras_of
from phase2_prefill_decode.model import Model
from phase3_chunked_prefill.budget import TokenBudget
from phase4_radix.prefix_cache import PrefixCache
from phase5_continuous.engine import continuous
from tests.phase2_prefill_decode.models import saved, variant


@pytest.fixture(scope="module")
def oracle() -> Any:
    return variant("qwen3")


@pytest.fixture(scope="module")
def model(oracle: Any, tmp_path_factory: pytest.TempPathFactory) -> Model:
    directory: Path = saved(oracle, tmp_path_factory.mktemp("small"))
    return Model.load(directory, device="cpu", dtype="float32")


def prompt(length: int, seed: int = 0) -> tuple[int, ...]:
    draw = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(3, 300, (length,), generator=draw).tolist())


def check(oracle: Any, request: Request) -> None:
    """The logprob of each prompt token but the first, and the top ones in its place, against transformers."""
    tokens = torch.tensor([request.prompt_tokens])
    with torch.inference_mode():
        logprobs = oracle(tokens).logits[0].float().log_softmax(-1)
    assert len(extras_of(request).prompt_logprobs) == len(request.prompt_tokens) - 1
    for position, (found, token) in enumerate(
        zip(extras_of(request).prompt_logprobs, request.prompt_tokens[1:], strict=True)
    ):
        assert found.logprob == pytest.approx(float(logprobs[position, token]), abs=1e-4)
        best = logprobs[position].topk(request.params.prompt_logprobs or 0)
        assert [value for _, value in found.top] == pytest.approx(best.values.tolist(), abs=1e-4)


def serve(loop: EngineCore[Any, Any], *requests: Request) -> None:
    for request in requests:
        loop.submit(request)
    for _ in loop.run():
        pass
    assert [request.finish_reason for request in requests] == [FinishReason.LENGTH] * len(requests)


@pytest.mark.parametrize("chunk", [1, 7, 64])
@pytest.mark.parametrize("length", [1, 2, 16, 33])
def test_prompt_logprobs_do_not_depend_on_chunks(oracle: Any, model: Model, chunk: int, length: int) -> None:
    asks = SamplingParams(max_tokens=2, temperature=0, ignore_eos=True, prompt_logprobs=3)
    quiet = SamplingParams(max_tokens=9, temperature=0, ignore_eos=True)
    loop = continuous(model, TokenBudget(chunk, 64), cache=PagedCache(64, 4)).core
    others = [Request(f"other-{n}", prompt(11, n), quiet) for n in range(3)]
    one = Request("one", prompt(length), asks)
    serve(loop, others[0], one, *others[1:])
    check(oracle, one)
    assert all(extras_of(other).prompt_logprobs == [] for other in others)


def test_a_cached_prompt_is_computed_again_for_its_logprobs(oracle: Any, model: Model) -> None:
    loop = continuous(model, cache=PrefixCache(64, 4)).core
    serve(loop, Request("before", prompt(33), SamplingParams(max_tokens=2, temperature=0, ignore_eos=True)))
    assert loop.scheduler.cache.cached_tokens(Request("again", prompt(33))) == 32
    one = Request("one", prompt(33), SamplingParams(max_tokens=2, temperature=0, ignore_eos=True, prompt_logprobs=2))
    serve(loop, one)
    check(oracle, one)
    assert loop.scheduler.cache.usage.cached == 8, "the pages computed again are deduplicated"


@pytest.mark.parametrize("cache", [PagedCache, PrefixCache])
def test_a_preemption_keeps_prompt_logprobs_complete(oracle: Any, model: Model, cache: type[PagedCache]) -> None:
    asks = SamplingParams(max_tokens=30, temperature=0, ignore_eos=True, prompt_logprobs=1)
    loop = continuous(model, TokenBudget(5, 16), cache=cache(14, 4)).core
    requests = [Request(f"r{n}", prompt(20, n), asks) for n in range(3)]
    serve(loop, *requests)
    assert loop.scheduler.running_set.num_preemptions > 0
    for request in requests:
        check(oracle, request)


def test_phase_2s_engine_gives_the_same_prompt_logprobs(oracle: Any, model: Model) -> None:
    asks = SamplingParams(max_tokens=3, temperature=0, ignore_eos=True, prompt_logprobs=2)
    for completion in static(model).generate([prompt(19), prompt(5, 1)], asks):
        check(oracle, completion.request)

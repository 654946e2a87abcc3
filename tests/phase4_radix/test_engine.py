"""The prefix cache changes no token: on and off, cold and warm, and in pools so small that it always evicts."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
import torch

from phase0_request.params import SamplingParams
from phase2_prefill_decode.engine import Engine
from phase2_prefill_decode.model import Model
from phase2_prefill_decode.scheduler import StaticScheduler
from phase3_chunked_prefill.budget import TokenBudget
from phase4_radix.engine import cached
from phase4_radix.extras.invariants import check_cache
from phase4_radix.prefix_cache import PrefixCache
from tests.phase2_prefill_decode.models import saved, variant
from tests.phase2_prefill_decode.test_identity import follows, theirs

ANSWER = 8
GREEDY = SamplingParams(temperature=0, max_tokens=ANSWER, ignore_eos=True)
SMALL_STEPS = TokenBudget(max_chunk_size=8, max_batched_tokens=20)


class Case(NamedTuple):
    """A model, prompts with shared prefixes, and what transformers generates for each."""

    model: Model
    prompts: list[list[int]]
    wanted: list[list[int]]


def sharing(vocabulary: int, lengths: Sequence[tuple[int, int]]) -> list[list[int]]:
    """Prompts that share a prefix: how many tokens of it each has, and how many of its own."""
    draw = torch.Generator().manual_seed(3)

    def tokens(count: int) -> list[int]:
        return torch.randint(3, vocabulary, (count,), generator=draw).tolist()

    prefix = tokens(max(common for common, _ in lengths))
    return [prefix[:common] + tokens(own) for common, own in lengths]


@pytest.fixture(scope="module", params=["qwen3", "llama-biases", "mistral-window"])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    """Lengths around page borders; one prompt is a prefix of others, two are equal."""
    oracle = variant(request.param)
    model = Model.load(saved(oracle, tmp_path_factory.mktemp("model")), device="cpu", dtype="float32")
    prompts = sharing(
        oracle.config.vocab_size, [(48, 0), (48, 0), (48, 9), (31, 20), (32, 1), (17, 30), (0, 40), (1, 0)]
    )
    return Case(model, prompts, [theirs(oracle, prompt, ANSWER) for prompt in prompts])


def generated(engine: Engine[StaticScheduler], prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    return [answer.output_tokens for answer in engine.generate(prompts, GREEDY)]


def prefix_cache_of(engine: Engine[StaticScheduler]) -> PrefixCache:
    cache = engine.core.scheduler.cache
    assert isinstance(cache, PrefixCache)
    return cache


def watched(engine: Engine[StaticScheduler]) -> list[int]:
    """Check the cache after each step and fill freed pages with NaN, so that reading one shows. Returns a list that
    collects how many pages each step evicts."""
    cache, core, evictions = prefix_cache_of(engine), engine.core, list[int]()
    step, release, pool = core.step, cache.allocator.release, core.runner.pool  # type: ignore[attr-defined]

    def checked() -> Any:
        before = cache.counts.evictions
        done = step()
        check_cache(cache)
        evictions.append(cache.counts.evictions - before)
        return done

    def poisoned(pages: Sequence[int]) -> int:
        freed = release(pages)
        gone = [page for page in pages if cache.allocator.count(page) == 0]
        for tensor in pool.tensors:
            tensor[gone] = torch.nan
        return freed

    core.step = checked  # type: ignore[method-assign]
    cache.allocator.release = poisoned  # type: ignore[method-assign]
    return evictions


class TestInvariance:
    """Float32, greedy: token for token what transformers generates, whatever the cache finds."""

    @pytest.mark.parametrize("batch_size", [1, 3, 64])
    @pytest.mark.parametrize("budget", [None, SMALL_STEPS], ids=["whole", "chunks"])
    def test_on_cold_then_warm(self, case: Case, budget: TokenBudget | None, batch_size: int) -> None:
        engine = cached(case.model, budget, num_pages=64, batch_size=batch_size)
        watched(engine)
        counts = prefix_cache_of(engine).counts
        assert generated(engine, case.prompts) == case.wanted
        cold = counts.hit_tokens
        assert (cold > 0) is (batch_size < 64)  # those of one batch do not find each other
        assert generated(engine, case.prompts) == case.wanted
        assert counts.hit_tokens - cold == sum((len(prompt) - 1) // 16 * 16 for prompt in case.prompts)

    @pytest.mark.parametrize("page_size", [1, 5])
    def test_pages_of_other_sizes(self, case: Case, page_size: int) -> None:
        engine = cached(case.model, num_pages=640 // page_size, page_size=page_size, batch_size=2)
        watched(engine)
        assert [generated(engine, case.prompts) for _ in range(2)] == [case.wanted] * 2
        assert prefix_cache_of(engine).counts.hit_tokens > 0

    @pytest.mark.parametrize("num_pages", [17, 34])
    @pytest.mark.parametrize("budget", [None, SMALL_STEPS], ids=["whole", "chunks"])
    def test_on_in_a_small_pool(self, case: Case, budget: TokenBudget | None, num_pages: int) -> None:
        """The pool holds the longest request once or twice, and little else."""
        engine = cached(case.model, budget, num_pages=num_pages, page_size=4)
        evictions = watched(engine)
        for step in (1, -1, 1):
            assert generated(engine, case.prompts[::step]) == case.wanted[::step]
        assert sum(evictions) > num_pages
        assert prefix_cache_of(engine).counts.hit_tokens > 50


def test_sampling_does_not_depend_on_cache_hits(case: Case) -> None:
    params = [SamplingParams(temperature=1.1, max_tokens=12, seed=n, ignore_eos=True) for n in range(len(case.prompts))]
    engine = cached(case.model)
    cold, warm = ([answer.output_tokens for answer in engine.generate(case.prompts, params)] for _ in range(2))
    assert prefix_cache_of(engine).counts.hit_tokens > 0
    assert cold == warm


@pytest.mark.proof
def test_the_bundled_model_finds_its_own_answer_in_the_next_turn() -> None:
    from transformers import AutoModelForCausalLM

    from phase0_request.tokenizer import BUNDLED

    model = Model.load(device="cpu", dtype="float32")
    assert model.tokenizer is not None
    engine = cached(model)
    prompt = model.tokenizer.chat([{"role": "user", "content": "What is a KV cache?"}])
    (first,) = engine.generate([prompt], SamplingParams(temperature=0, max_tokens=64))
    said = [*prompt, *first.output_tokens]
    after = [*said, *model.tokenizer.encode("\n"), *prompt]
    assert prefix_cache_of(engine).counts.hit_tokens == 0
    (second,) = engine.generate([after], GREEDY)
    assert prefix_cache_of(engine).counts.hit_tokens == (len(said) - 1) // 16 * 16  # its last token was never computed
    oracle = AutoModelForCausalLM.from_pretrained(BUNDLED, dtype=torch.float32).eval()
    assert follows(oracle, after, second.output_tokens)

"""Pages before a window are freed, and no token changes: greedy, float32, beside transformers."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
import torch

from phase0_request.params import SamplingParams
from phase0_request.request import Request
from phase0_request.support.checks import ConfigError
from phase1_kv_pool import PagedCache, PageUsage
from phase1_kv_pool.extras.layer_groups import LayerGroups
from phase1_kv_pool.extras.windows import WindowedCache
from phase2_prefill_decode.connect import runner_for
from phase2_prefill_decode.engine import Engine, static
from phase2_prefill_decode.extras.piecewise import record_pieces
from phase2_prefill_decode.model import Model, sampler_for
from phase2_prefill_decode.step.packed import PackedStep
from phase2_prefill_decode.step.runner import ModelRunner
from phase3_chunked_prefill.budget import TokenBudget
from phase4_radix.extras.windows import WindowedPrefixCache
from phase5_continuous.engine import continuous
from phase5_continuous.extras.invariants import check
from phase5_continuous.scheduler import Scheduler
from tests.phase2_prefill_decode.models import VARIANTS, saved, tiny_model, variant
from tests.phase2_prefill_decode.test_families import VARIANTS as MORE_VARIANTS
from tests.phase2_prefill_decode.test_identity import theirs

ANSWER = 24
CHUNK = 8
PAGE = 4
LONGEST = 128  # tokens
BUDGET = TokenBudget(CHUNK, 20)


class Case(NamedTuple):
    model: Model
    prompts: list[list[int]]
    wanted: list[list[int]]

    def cache(self, kind: type[WindowedCache], pages: int, ahead: int = 0) -> WindowedCache:
        groups = LayerGroups.of(self.model.config.windows, CHUNK * (1 + ahead))
        assert groups is not None
        return kind(groups, pages * groups.count, PAGE)


@pytest.fixture(scope="module", params=["mistral-window", "qwen2-window", "qwen3-window", "gemma3", "gpt-oss-limits"])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    """All layers have windows; the first has none; the second has none; the last has none, also beside rotary angles of
    its own, and with sinks and experts. Prompts share prefixes, two are equal."""
    if request.param in VARIANTS:
        oracle = variant(request.param)
    else:
        family, options = MORE_VARIANTS[request.param]
        oracle = tiny_model(family, **options)
    model = Model.load(saved(oracle, tmp_path_factory.mktemp("model")), device="cpu", dtype="float32")
    draw = torch.Generator().manual_seed(3)

    def tokens(count: int) -> list[int]:
        return torch.randint(3, oracle.config.vocab_size, (count,), generator=draw).tolist()

    prefix = tokens(60)
    lengths = (48, 0), (48, 0), (48, 9), (60, 20), (31, 20), (0, 40), (1, 0)
    prompts = [prefix[:shared] + tokens(own) for shared, own in lengths]
    return Case(model, prompts, [theirs(oracle, prompt, ANSWER) for prompt in prompts])


def engine_over(model: Model, cache: WindowedCache, ahead: int = 0, recorded: int = 0) -> Engine[Scheduler]:
    """Its invariants are checked after each step, and what a page that becomes free held is replaced by NaN. Steps of
    up to `recorded` decodes are recorded."""
    engine = continuous(model, BUDGET, cache=cache, ahead=ahead)
    runner = engine.core.runner
    assert isinstance(runner, ModelRunner)
    if recorded:
        size = 2 * recorded, LONGEST // PAGE
        runner = runner_for(model.decoder, cache, sampler_for(model), None, size, ahead=ahead > 0)
        runner.record([1, 2, recorded], LONGEST, lambda compute: compute)
        engine.core.runner = runner
    step, release = engine.core.step, cache.pages.memory.release

    def checked() -> Any:
        done = step()
        check(engine.core.scheduler)
        return done

    def poisoned(pages: Sequence[int]) -> int:
        for layer in runner.pool.layers:
            layer.keys[[*pages]] = layer.values[[*pages]] = torch.nan
        return release(pages)

    engine.core.step = checked  # type: ignore[method-assign]
    cache.pages.memory.release = poisoned  # type: ignore[method-assign]
    return engine


def generated(engine: Engine[Any], prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    params = SamplingParams(temperature=0, max_tokens=ANSWER, ignore_eos=True)
    return [answer.output_tokens for answer in engine.generate(prompts, params)]


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("kind", [WindowedCache, WindowedPrefixCache])
@pytest.mark.parametrize("pages", [400, 27], ids=["large", "small"])
def test_tokens_are_those_of_transformers(case: Case, kind: type[WindowedCache], pages: int, ahead: int) -> None:
    """In a pool with room for all, and in one for the longest request: with preemptions and evictions."""
    cache = case.cache(kind, pages, ahead)
    engine = engine_over(case.model, cache, ahead)
    for order in (1, -1):
        assert generated(engine, case.prompts[::order]) == case.wanted[::order]
    assert cache.usage.referenced == 0
    if isinstance(cache, WindowedPrefixCache):
        assert cache.counts.hit_tokens > 0
        assert (cache.counts.evictions > 0) == (pages < 400)
        cache.reset()
    assert cache.usage == PageUsage(cache.usage.total, cache.usage.total, 0)


def test_an_engine_made_by_hand_has_the_pool_of_its_cache(case: Case) -> None:
    prompts, wanted = case.prompts[:3], case.wanted[:3]
    groups = LayerGroups.of(case.model.config.windows)
    assert groups is not None
    for engine in (
        static(case.model, cache=WindowedCache(groups, 400, PAGE)),
        continuous(case.model, BUDGET, cache=case.cache(WindowedPrefixCache, 400)),
    ):
        assert generated(engine, prompts) == wanted


def test_a_cache_for_other_windows_is_refused(case: Case) -> None:
    windows = case.model.config.windows
    shorter = [None if window is None else window - 1 for window in windows]
    for other in (shorter, windows[1:], [*windows, None], [8] * (len(windows) + 1)):
        groups = LayerGroups.of(other, CHUNK)
        assert groups is not None
        with pytest.raises(ConfigError, match="make its groups by LayerGroups"):
            static(case.model, cache=WindowedCache(groups, 400, PAGE))


def test_pieces_have_one_page_table(case: Case) -> None:
    """Of a model of the core's layers, with windows in some."""
    if None not in case.model.config.windows:
        pytest.skip("one group has one page table")
    runner = engine_over(case.model, case.cache(WindowedCache, 400)).core.runner
    assert isinstance(runner, ModelRunner)
    with pytest.raises(ConfigError, match=r"one page table for all layers|records layers like Llama"):
        record_pieces(runner, (4,), LONGEST, lambda compute: pytest.fail("nothing is recorded"))


def test_a_conversation_finds_its_last_turn_and_a_shared_prompt_its_end(case: Case) -> None:
    cache = case.cache(WindowedPrefixCache, 400)
    assert isinstance(cache, WindowedPrefixCache)
    engine, (prompt, *_) = engine_over(case.model, cache), case.prompts
    (answer,) = generated(engine, [prompt])
    known = (len(prompt) + ANSWER - 1) // PAGE * PAGE
    turn = [*prompt, *answer, 7, 8, 9]
    before = cache.counts.hit_tokens
    (answer,) = generated(engine, [turn])
    assert cache.counts.hit_tokens - before == known
    assert generated(engine, [[*prompt, *turn[:5]]])  # branches off at the end of the first prompt
    assert cache.counts.hit_tokens - before == known + len(prompt) // PAGE * PAGE
    plain = continuous(case.model, BUDGET)
    assert generated(plain, [turn, [*prompt, *turn[:5]]]) == generated(engine, [turn, [*prompt, *turn[:5]]])


def test_a_match_ends_where_the_whole_window_is_cached(case: Case) -> None:
    """The windowed pages in the middle of a cached prompt are gone: a prompt that branches off there computes it again,
    and then its windowed pages are there."""
    cache = case.cache(WindowedPrefixCache, 400)
    assert isinstance(cache, WindowedPrefixCache)
    engine, prompt = engine_over(case.model, cache), case.prompts[3]
    wanted = generated(engine, [prompt])
    while cache.unheld and cache.times[cache.unheld.oldest()] < 0:
        cache._evict_windowed()
    other = [*prompt[:40], *range(5, 25)]
    before = cache.counts.hit_tokens
    first = generated(engine, [other])
    assert cache.counts.hit_tokens == before
    pages = cache.tree.match(prompt[:40]).pages
    assert [page in cache.reused for page in pages] == [index >= 10 - cache.before for index in range(10)]
    assert generated(engine, [other, prompt]) == [*first, *wanted]
    assert cache.counts.hit_tokens > before + 40


def test_recorded_steps_have_page_tables_of_all_groups(case: Case) -> None:
    cache = case.cache(WindowedPrefixCache, 400, ahead=1)
    engine = engine_over(case.model, cache, ahead=1, recorded=8)
    graphs = engine.core.runner.graphs
    assert graphs is not None
    size_for, sizes = graphs.size_for, list[int]()

    def noted(step: PackedStep) -> int:
        size = size_for(step)
        if step.max_seqlen_q == 1:
            sizes.append(size)
        return size

    graphs.size_for = noted  # type: ignore[method-assign]
    assert generated(engine, case.prompts) == case.wanted
    assert len(sizes) > ANSWER // 2
    assert all(sizes)  # also where every request begins a page, in each group


def test_the_watermark_is_a_share_of_the_pool_whatever_the_number_of_groups() -> None:
    groups = LayerGroups.of([None] * 6 + [8], 16)
    assert groups is not None
    assert groups.full == 6
    cache = WindowedCache(groups, 1200, PAGE)
    watermark = Scheduler(cache, watermark=0.1).running_set.watermark
    request = Request("long", (5,) * 200)
    cache.attach(request)
    cache.grow(request, 200)
    assert cache.lacking(request, 200 + watermark) == 120
    assert Scheduler(PagedCache(1200, PAGE), watermark=0.1).running_set.watermark == 120 * PAGE


def test_requests_that_begin_a_page_together_are_replayed(case: Case) -> None:
    prompt, wanted = case.prompts[0], case.wanted[0]
    engine = engine_over(case.model, case.cache(WindowedCache, 400), recorded=4)
    graphs = engine.core.runner.graphs
    assert graphs is not None
    launched, size_for = list[PackedStep](), graphs.size_for
    graphs.size_for = lambda step: size_for(step) or launched.append(step) or 0  # type: ignore[method-assign,func-returns-value]
    assert generated(engine, [prompt] * 4) == [wanted] * 4
    assert all(step.max_seqlen_q > 1 for step in launched)


def test_a_long_request_holds_its_window_only(case: Case) -> None:
    """Where all layers have windows, a pool of a few pages serves a request of any length."""
    if None in case.model.config.windows:
        pytest.skip("layers without a window keep every page")
    cache = case.cache(WindowedCache, 5)
    engine = engine_over(case.model, cache)
    assert generated(engine, case.prompts) == case.wanted
    assert cache.max_tokens > 1 << 30

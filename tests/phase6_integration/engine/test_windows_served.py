"""The engine of a server over layers with windows: which cache it has, and the same tokens from all of them."""

from pathlib import Path
from typing import Any

import pytest

from phase0_request.params import SamplingParams
from phase0_request.support.checks import ConfigError
from phase1_kv_pool import PagedCache
from phase1_kv_pool.extras.windows import WindowedCache
from phase4_radix.extras.windows import WindowedPrefixCache
from phase4_radix.prefix_cache import PrefixCache
from phase6_integration.engine.engine import NanoServingEngine
from tests.phase2_prefill_decode.models import saved, variant

SMALL = {"dtype": "float32", "device": "cpu", "page_size": 4, "max_chunk_size": 8, "check_invariants": True}
PROMPTS = [[*range(5, 60)], [*range(5, 40), *range(90, 120)], [*range(5, 60)]]
GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
MASKED = {"disable_hybrid_kv_cache_manager": True}


@pytest.fixture(scope="module", params=["mistral-window", "qwen3-window"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(variant(request.param), tmp_path_factory.mktemp("model"))


def served(model: Path, **options: Any) -> tuple[PagedCache, list[list[int]], int]:
    """The cache of an engine, its outputs, and its context length."""
    with NanoServingEngine.from_pretrained(str(model), **SMALL, **options) as engine:
        outputs = [output.output_tokens for output in engine.generate(PROMPTS, GREEDY)]
        return engine.parts.scheduler.cache, outputs, engine.parts.model.config.max_position_embeddings


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({}, WindowedPrefixCache),
        ({"enable_prefix_caching": False}, WindowedCache),
        ({"kv_cache_pages": 60, "async_scheduling": True}, WindowedPrefixCache),
        ({"speculative_config": {"method": "ngram"}}, WindowedPrefixCache),
    ],
    ids=["default", "no-prefixes", "small-and-ahead", "drafts"],
)
def test_windows_free_pages_and_no_token_changes(model: Path, options: dict[str, Any], kind: type[PagedCache]) -> None:
    masked, wanted, _ = served(model, **MASKED)
    cache, outputs, _ = served(model, **options)
    assert type(masked) is PrefixCache
    assert type(cache) is kind
    assert outputs == wanted


def test_the_same_memory_serves_longer_requests(model: Path) -> None:
    """Where a pool limits the context: 40 pages of all layers, as pages of a group."""
    cache, _, context = served(model, **MASKED, kv_cache_pages=40)
    groups = 1 if "mistral" in (model / "config.json").read_text() else 3
    windowed, _, longer = served(model, disable_hybrid_kv_cache_manager=False, kv_cache_pages=40 * groups)
    assert (cache.usage.total, windowed.usage.total) == (40, 40 * groups)
    assert (context, longer) == (160, 256)  # 256: all that the model has


def test_a_window_that_hides_nothing_leaves_the_cache_as_it_is(model: Path) -> None:
    with NanoServingEngine.from_pretrained(str(model), **SMALL, max_model_len=5) as engine:
        assert type(engine.parts.scheduler.cache) is PrefixCache


def test_what_has_one_page_table_for_all_layers_refuses_others(model: Path) -> None:
    draft = {"speculative_config": {"method": "draft_model", "model": str(model), "num_speculative_tokens": 2}}
    cache, outputs, _ = served(model, **draft)
    assert type(cache) is PrefixCache
    assert outputs == served(model, **MASKED)[1]
    with pytest.raises(ConfigError, match="goes neither with tensor_parallel_size, nor with"):
        served(model, **draft, disable_hybrid_kv_cache_manager=False)

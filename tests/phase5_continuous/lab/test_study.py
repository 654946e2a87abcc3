"""The study: the same requests for both engines, and the figures that the chapter quotes."""

import pytest

from phase2_prefill_decode.lab.shapes import SHAPES
from phase2_prefill_decode.loading.model import Model
from phase5_continuous.lab import study

VOCABULARY = SHAPES["17m"].vocab_size


@pytest.fixture(scope="module")
def model() -> Model:
    return study.model_of("17m")


def test_the_workload_is_the_same_every_time_and_lengths_are_not_known_beforehand() -> None:
    prompts, params = study.workload(VOCABULARY, 50)
    assert (prompts, params) == study.workload(VOCABULARY, 50)
    assert prompts != study.workload(VOCABULARY, 50, seed=1)[0]
    assert all(8 <= len(prompt) <= 512 for prompt in prompts)
    assert {one.max_tokens for one in params} == {study.MOST}  # so the limit does not give the length away
    assert all(1 <= len(one.stop_token_ids) <= 128 for one in params)


def test_each_engine_serves_the_whole_set(model: Model) -> None:
    static, continuous = (study.serve(model, way, 3) for way in ("static", "continuous"))
    assert static.requests == continuous.requests == 3
    assert static.preemptions == 0
    for one in (static, continuous):
        assert one.tokens == round(one.mean_tokens * 3)
        assert one.longest <= study.MOST
        assert one.ttft_p50_ms <= one.ttft_p99_ms <= one.seconds * 1e3
        assert one.tokens_per_second == pytest.approx(one.tokens / one.seconds)

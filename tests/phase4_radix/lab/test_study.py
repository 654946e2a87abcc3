"""The figures of the study that do not depend on the machine, and what it records."""

import pytest

from phase2_prefill_decode.model import Model
from phase4_radix.lab import study
from tests.phase2_prefill_decode.tiny import TINY


@pytest.fixture(scope="module")
def model() -> Model:
    return Model.random(TINY, device="cpu", dtype="float32")


@pytest.mark.proof
def test_a_shared_prefix_saves_most_of_the_prefill(model: Model) -> None:
    """16 requests that share 512 of 544 tokens, one after the other: the first computes all, the others their own."""
    ways = {name: study.serve(model, **study.WAYS[name], answer=2) for name in ("off", "on")}
    off, on = ways["off"], ways["on"]
    assert off.prefill_tokens == 16 * 544
    assert on.prefill_tokens == 544 + 15 * 32
    assert study.gains(ways)["prefill_saved"] == 1 - on.prefill_tokens / off.prefill_tokens >= 0.85
    assert (off.hit_rate, on.hit_rate) == (0.0, 15 * 512 / (16 * 544))
    assert off.duplicates == on.duplicates == 0


def test_requests_of_one_batch_find_only_earlier_prefixes(model: Model) -> None:
    cold = study.serve(model, **study.WAYS["on_together"], answer=1)
    assert (cold.prefill_tokens, cold.duplicates, cold.hit_rate) == (16 * 544, 15 * 32, 0.0)
    warm = study.serve(model, **study.WAYS["on_together_warm"], answer=1)
    assert (warm.prefill_tokens, warm.duplicates, warm.hit_rate) == (16 * 32, 0, 512 / 544)

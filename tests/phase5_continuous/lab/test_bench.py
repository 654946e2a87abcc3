from itertools import islice

import pytest

from phase5_continuous.lab import bench


@pytest.mark.parametrize("cache", ["plain", "prefix"])
def test_every_request_decodes_in_every_timed_step(cache: str) -> None:
    core = bench.decoding(bench.CACHES[cache], running=20, steps=30)
    for step in islice(core.run(), 30):
        assert (step.prefill_tokens, step.decode_tokens) == (0, 20)


def test_both_caches_serve_the_same_requests() -> None:
    plain, prefix = (bench.lives(cache, running=8, requests=30) for cache in ("plain", "prefix"))
    assert plain.slices == prefix.slices > 30 * 30

"""The tuning of the decode kernel: its defaults, and its search with a fake timer."""

import math

import pytest

from phase2_prefill_decode.kernels.triton.tuning import Tuning, default
from phase2_prefill_decode.lab import tune

SHAPE = tune.Shape(head_dim=128, group=4, page_size=16)


@pytest.mark.parametrize(("group", "chunk"), [(1, 128), (4, 256), (7, 448), (8, 512), (71, 512)])
def test_the_default_split_is_longer_the_more_heads_share_its_keys(group: int, chunk: int) -> None:
    assert default(group).chunk == chunk
    assert 2 * group / chunk <= 1 / 32 or chunk == 512, "traffic of the join"


def test_the_search_keeps_the_candidate_that_is_best_over_all_batches() -> None:
    wanted = Tuning(128, 32, 4, 4)

    def seconds(shape: tune.Shape, tuning: Tuning, batch: tuple[int, int]) -> float:
        assert shape == SHAPE
        if tuning.num_warps == 8:
            return math.inf  # does not fit
        if tuning == Tuning(512, 64, 4, 3):
            return 0.1 if batch == (256, 1536) else 20.0  # best at the largest batch alone
        return 1.0 if tuning == wanted else 2.0

    assert tune.best(SHAPE, seconds) == (wanted, pytest.approx(2.0))

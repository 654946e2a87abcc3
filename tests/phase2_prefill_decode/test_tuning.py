"""The tuning of the decode kernel: its defaults, and its search with a fake timer."""

import pytest

from phase2_prefill_decode.kernels.triton.tuning import default


@pytest.mark.parametrize(("group", "chunk"), [(1, 128), (4, 256), (7, 448), (8, 512), (71, 512)])
def test_the_default_split_is_longer_the_more_heads_share_its_keys(group: int, chunk: int) -> None:
    assert default(group).chunk == chunk
    assert 2 * group / chunk <= 1 / 32 or chunk == 512, "traffic of the join"

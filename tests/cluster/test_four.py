"""Four replicas of the bundled model on this machine, by Ray Serve."""

from concurrent.futures import ThreadPoolExecutor

from asking import LONG, ask
from conftest import Deployed


def test_a_prefix_that_all_share_is_served_by_all_replicas(four: Deployed) -> None:
    client = four.client()
    ask(client, LONG)
    before = four.engine_seconds()
    with ThreadPoolExecutor(32) as pool:
        assert all(pool.map(lambda number: ask(client, f"{LONG} {number}", max_tokens=48), range(160)))
    used = [now - then for now, then in zip(four.engine_seconds(), before, strict=True)]
    assert len(used) == 4
    assert max(used) < 3 * min(used), used
    stats = four.stats()["prefix_cache"]
    assert stats["hit_rate"] > 0.5, stats

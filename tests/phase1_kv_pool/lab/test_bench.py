import pytest
import torch

from phase1_kv_pool.lab import bench
from phase1_kv_pool.pool import KVPool


@pytest.mark.parametrize("tokens", [1, 64, 65, 512])
def test_store_slots_are_those_of_decode_and_prefill_steps(tokens: int) -> None:
    """No slot twice in one call; a decode writes one token to each page, a prompt whole pages; all pages are used."""
    pool = KVPool(bench.LAYER, 256)
    calls = list(bench._slots(tokens, pool))
    pages = tokens if tokens <= 64 else -(-tokens // 16)
    assert len(calls) == 256 // pages
    for slots in calls:
        assert len(set(slots.tolist())) == tokens
        assert len(set((slots // 16).tolist())) == pages
    all_slots = torch.cat(calls)
    assert len(set(all_slots.tolist())) == len(all_slots)
    assert all_slots.min() >= 0
    assert all_slots.max() < pool.num_slots

"""Memory of a KV pool that is there before it is written."""

import sys
from itertools import count
from pathlib import Path

import pytest
import torch

from phase1_kv_pool.extras.touched import HUGE_PAGE, touch
from phase1_kv_pool.layout import KVLayout
from phase1_kv_pool.pool import KVPool

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="madvise gives memory on Linux only")


def pool_of(megabytes: int) -> KVPool:
    layout = KVLayout(layers=2, kv_heads=2, head_dim=64, page_size=16, dtype="float32")
    return KVPool(layout, (megabytes << 20) // layout.bytes_per_page)


def places(pool: KVPool) -> list[tuple[int, int]]:
    return [(tensor.data_ptr(), tensor.nbytes) for tensor in pool.tensors]


def resident() -> int:
    """The bytes of this process that are in memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


def test_a_touched_pool_is_in_memory_and_keeps_what_it_holds() -> None:
    pool = pool_of(64)
    pool.layers[1].values[3] = 7
    before = resident()
    given = touch(places(pool), seconds=60)
    assert 0.99 * (64 << 20) < given <= 64 << 20
    assert resident() - before > 0.9 * given
    assert torch.equal(pool.layers[1].values[3], torch.full_like(pool.layers[1].values[3], 7))
    assert not pool.layers[0].keys.any()


def test_the_first_pages_of_every_layer_come_first_if_time_ends() -> None:
    time = count()
    pool = pool_of(64)
    assert touch(places(pool), seconds=6, clock=lambda: next(time)) <= 5 * HUGE_PAGE

"""Memory of a KV pool that is there before it is written."""

import mmap
import resource
import sys
from itertools import count

import pytest
import torch

from phase1_kv_pool.extras import touched
from phase1_kv_pool.extras.touched import touch
from phase1_kv_pool.layout import KVLayout
from phase1_kv_pool.pool import KVPool

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="madvise gives memory on Linux only")


def gives_memory() -> bool:
    """Whether this system gives memory that is not written yet: Linux does since 5.14, and some sandboxes do not."""
    tensor = torch.zeros(4 * mmap.PAGESIZE, dtype=torch.uint8)
    return touch([(tensor.data_ptr(), tensor.nbytes)]) > 0


def pool_of(megabytes: int) -> KVPool:
    layout = KVLayout(layers=2, kv_heads=2, head_dim=64, page_size=16, dtype="float32")
    return KVPool(layout, (megabytes << 20) // layout.bytes_per_page)


def places(pool: KVPool) -> list[tuple[int, int]]:
    return [(tensor.data_ptr(), tensor.nbytes) for tensor in pool.tensors]


def faults() -> int:
    """How often this process has waited for memory that was not there."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


@pytest.mark.skipif(not gives_memory(), reason="this system gives memory only when it is written")
def test_a_touched_pool_is_in_memory_and_keeps_what_it_holds() -> None:
    pool = pool_of(64)
    pool.layers[1].values[3] = 7
    given = touch(places(pool), threads=2, seconds=60)
    assert 0.99 * (64 << 20) < given <= 64 << 20
    torch.zeros(8)[::4].add_(0)  # the code of the operator is there, too
    before = faults()
    for tensor in pool.tensors:
        tensor.view(-1)[:: mmap.PAGESIZE // 4].add_(0)  # a number of each page of memory, in place
    assert faults() - before < 16, "64 MiB are 32 huge pages, or 16,384 small ones"
    assert torch.equal(pool.layers[1].values[3], torch.full_like(pool.layers[1].values[3], 7))
    assert not pool.layers[0].keys.any()


def test_the_first_pages_of_every_layer_come_first_if_time_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    time, starts = count(), list[int]()
    monkeypatch.setattr(touched, "_populate", lambda start, size: starts.append(start) or True)
    tensors = places(pool_of(64))
    assert len(tensors) == 4
    touch(tensors, seconds=7, clock=lambda: next(time))
    numbers = [start // touched.HUGE_PAGE - tensors[i % 4][0] // touched.HUGE_PAGE for i, start in enumerate(starts)]
    assert numbers == [0, 0, 0, 0, 1, 1], "the time of the fifth and sixth is left for the second pages of two tensors"


def test_no_two_threads_ask_for_parts_of_one_huge_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second would wait for the first, or zero a page in vain."""
    asked = list[tuple[int, int]]()
    monkeypatch.setattr(touched, "_populate", lambda start, size: asked.append((start, size)) or True)
    address, size = 5 * touched.HUGE_PAGE - 3 * mmap.PAGESIZE - 64, 4 * touched.HUGE_PAGE
    pages = size // mmap.PAGESIZE - 1  # the first and the last are not whole
    assert touch([(address, size)], threads=2, seconds=60) == pages * mmap.PAGESIZE
    assert sorted(start // touched.HUGE_PAGE for start, _ in asked) == [4, 5, 6, 7, 8]
    assert sum(size for _, size in asked) == pages * mmap.PAGESIZE

"""Memory on a CPU that is there before it is written: of a KV pool before the first request, of a weight before it is
packed.

The system gives a page of memory when it is first written, zeroed. A virtual machine may have returned free memory to
its host: 2 MiB then take milliseconds, as long as computing the keys and values that belong there. Linux gives pages
before they are written, if asked, and to several threads at once.
"""

import ctypes
import mmap
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice

POPULATE_WRITE = 23  # of madvise, since Linux 5.14
HUGE_PAGE = 2 << 20
SECONDS = 0.5  # for all of a pool: what is left is given when it is first written


def touch(
    tensors: Sequence[tuple[int, int]],
    threads: int = 1,
    seconds: float = SECONDS,
    clock: Callable[[], float] = time.monotonic,
) -> int:
    """Ask for the memory of tensors, given by address and size: the first huge pages of all of them first. Return the
    bytes that are there."""
    end = clock() + seconds

    def give(thread: int) -> int:
        given = 0
        for start, size in islice(_pieces(tensors), thread, None, threads):
            if clock() >= end or not _populate(start, size):
                break
            given += size
        return given

    if not sys.platform.startswith("linux"):
        return 0
    with ThreadPoolExecutor(threads) as pool:
        return sum(pool.map(give, range(threads)))


def _pieces(tensors: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """What each tensor has of its first huge page, then of its second: its start and size, in whole pages of memory."""
    page = mmap.PAGESIZE
    places = [(-(-start // page) * page, (start + size) // page * page) for start, size in tensors]
    for number in range(max(end - start for start, end in places) // HUGE_PAGE + 2):
        for start, end in places:
            border = (start // HUGE_PAGE + number) * HUGE_PAGE
            first, last = max(start, border), min(end, border + HUGE_PAGE)
            if first < last:
                yield first, last - first


def _populate(start: int, size: int) -> bool:
    """Whether the system gives this memory."""
    return bool(ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), POPULATE_WRITE) == 0)

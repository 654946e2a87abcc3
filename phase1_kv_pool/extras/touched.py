"""Memory of a KV pool on a CPU that is there before the first request.

The system gives a page of memory when it is first written, zeroed: on some virtual machines 2 MiB take milliseconds, as
long as computing the keys and values that belong there. Linux gives pages before they are written, if asked.
"""

import ctypes
import mmap
import sys
import time
from collections.abc import Callable, Sequence

POPULATE_WRITE = 23  # of madvise, since Linux 5.14
HUGE_PAGE = 2 << 20
SECONDS = 0.5  # for all of a pool: what is left is given when it is first written


def touch(
    tensors: Sequence[tuple[int, int]], seconds: float = SECONDS, clock: Callable[[], float] = time.monotonic
) -> int:
    """Ask for the memory of the tensors of a pool, given by address and size: the first KV pages of all layers first.
    Return the bytes that are there."""
    if not sys.platform.startswith("linux"):
        return 0
    places, end, given = [_whole_pages(*tensor) for tensor in tensors], clock() + seconds, 0
    for offset in range(0, max(size for _, size in places), HUGE_PAGE):
        for start, size in places:
            count = min(size - offset, HUGE_PAGE)
            if count > 0 and (clock() >= end or not _populate(start + offset, count)):
                return given
            given += max(count, 0)
    return given


def _whole_pages(address: int, size: int) -> tuple[int, int]:
    """The start and the size of the pages of memory that lie within a tensor."""
    start = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    return start, max((address + size) // mmap.PAGESIZE * mmap.PAGESIZE - start, 0)


def _populate(start: int, size: int) -> bool:
    """Whether the system gives this memory."""
    return bool(ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), POPULATE_WRITE) == 0)

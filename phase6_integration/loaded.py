"""Loaded: what a process has loaded stays to its end, so the garbage collector need not look at it again.

CPython frees most objects when nothing holds them any more. For those that hold each other there is a collector: now
and then it walks over every object there is, while all else stands still. Of libraries and models there are hundreds of
thousands.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def for_good() -> Iterator[None]:
    """What is loaded in here is not walked over, neither meanwhile nor later."""
    gc.disable()
    try:
        yield
        put_aside()
    finally:
        gc.enable()


def put_aside() -> None:
    """What there is now is never walked over again."""
    gc.collect()
    gc.freeze()

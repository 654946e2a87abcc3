"""Keep the garbage collector away from the objects that a process loads at start-up.

CPython's collector stops the process while it walks over all its objects. Libraries and models are hundreds of
thousands of objects that are never garbage: `gc.freeze` excludes them.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def gc_freeze() -> Iterator[None]:
    """Disable the collector while the body loads, then freeze all objects that exist."""
    gc.disable()
    try:
        yield
        freeze()
    finally:
        gc.enable()


def freeze() -> None:
    """Exclude all objects that exist now from garbage collection."""
    gc.collect()
    gc.freeze()

"""gc_freeze: objects that exist after start-up are not walked by the garbage collector."""

import gc
import weakref

import pytest

from phase6_integration.engine.gc_freeze import gc_freeze


class Node:
    pass


def test_loaded_objects_are_frozen_and_new_garbage_is_still_collected() -> None:
    with gc_freeze():
        assert not gc.isenabled()
        kept = [Node() for _ in range(1000)]
    try:
        assert gc.isenabled()
        assert not any(isinstance(one, Node) for one in gc.get_objects())
        new = Node()
        new.itself = new  # type: ignore[attr-defined]
        gone = weakref.ref(new)
        del new
        gc.collect()
        assert gone() is None
        assert len(kept) == 1000
    finally:
        gc.unfreeze()
        gc.freeze()  # as conftest.py has left it


def test_a_failed_load_enables_the_collector_again() -> None:
    frozen = gc.get_freeze_count()
    with pytest.raises(ValueError, match="no such model"), gc_freeze():
        raise ValueError("no such model")
    assert gc.isenabled()
    assert gc.get_freeze_count() <= frozen, "nothing more is frozen"

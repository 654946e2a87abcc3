"""gc_freeze: objects that exist after start-up are not walked by the garbage collector."""

import gc
import os
import signal
import time
import weakref
from pathlib import Path

import pytest

from phase6_integration.engine.gc_freeze import gc_freeze
from tests.phase6_integration.life import PATIENCE, life

REPORTER = """
import gc, os, signal

def tell(*_):
    with open(f"{directory}/{os.getpid()}", "w") as told:
        told.write(f"{gc.get_freeze_count()} {gc.isenabled()}\\n")

signal.signal(signal.SIGUSR1, tell)
"""


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


@pytest.mark.slow  # starts the bundled model
def test_both_processes_of_a_server_freeze_what_they_loaded(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(REPORTER.replace("{directory}", str(tmp_path)))
    with life(PYTHONPATH=str(tmp_path)) as server:
        server.until("ready")
        for pid in (server.process.pid, *server.engines()):
            os.kill(pid, signal.SIGUSR1)
            told, deadline = tmp_path / str(pid), time.monotonic() + PATIENCE
            while not (told.exists() and told.read_text().endswith("\n")):
                assert time.monotonic() < deadline, f"{pid} does not report"
                os.sched_yield()
            count, enabled = told.read_text().split()
            assert int(count) > 20_000
            assert enabled == "True"

"""Runs pytest in a fork of one process, which has imported the libraries already. A run has a time limit."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, TypeVar

from chapters.events import SHRINKING, Recorder

AT_ONCE = max(1, min(os.cpu_count() or 1, 4))

os.environ.setdefault("OBJC_DISABLE_INITIALIZE_FORK_SAFETY", "YES")  # macOS: a fork may use what was imported before
os.environ.setdefault("PYTHONWARNINGS", "ignore:resource_tracker")  # a run that is ended leaves a semaphore or two
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["chapters.preload"])

T = TypeVar("T")
U = TypeVar("U")


def run_pytest(copy: Path, arguments: Sequence[str], log: Path, timeout: float, stop_at: str | None) -> Generator[Any]:
    """What a Recorder sends, then None if the run reached its end. After `timeout` seconds the run ends itself; the
    processes that it started are killed."""
    events, theirs = CONTEXT.Pipe(duplex=False)
    process = CONTEXT.Process(target=_run, args=(copy, arguments, log, timeout, stop_at, theirs))
    process.start()
    theirs.close()
    try:
        with suppress(EOFError):
            while events in wait([events, process.sentinel]):
                event = events.recv()
                yield event
                if event is None:
                    return
    finally:
        _kill(process)


def at_once(work: Callable[[T], U], items: Sequence[T]) -> Iterator[U]:
    """Yields `work` of each item in order, with AT_ONCE of them in progress. An interrupt ends their runs."""
    with ThreadPoolExecutor(AT_ONCE) as pool:
        try:
            yield from pool.map(work, items)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in multiprocessing.active_children():
                _kill(process)
            raise


def _kill(process: Any) -> None:
    """End a run, and what its tests have started."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    process.join()


def _run(
    copy: Path, arguments: Sequence[str], log: Path, timeout: float, stop_at: str | None, events: Connection
) -> None:
    """In the fork: run pytest in a process group of its own."""
    import pytest
    from hypothesis.internal.conjecture import engine

    os.setsid()
    output = os.open(log, os.O_CREAT | os.O_TRUNC | os.O_WRONLY)
    stacks = open(os.dup(output), "w")  # noqa: SIM115
    os.dup2(output, 1)
    os.dup2(output, 2)
    faulthandler.enable(stacks)
    faulthandler.dump_traceback_later(timeout, exit=True, file=stacks)
    engine.MAX_SHRINKING_SECONDS = SHRINKING
    os.chdir(copy)
    sys.path.insert(0, str(copy))
    os.environ["PYTHONPATH"] = str(copy)
    pytest.main(list(arguments), [Recorder(events.send, stop_at)])
    sys.stdout.flush()
    sys.stderr.flush()
    events.send(None)
    os._exit(0)  # threads that tests have left do not hold it

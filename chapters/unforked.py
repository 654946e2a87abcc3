"""Runs pytest in this process, where there are no others: in a browser's tab. The page ends what runs for too long."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import chdir, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, TypeVar

from chapters.events import SHRINKING, Recorder

OURS = ("phase", "tests")  # the packages that a run imports from its copy of the checkout
WATCHERS: list[Callable[[Any], object]] = []  # see what happens while a run goes on
T = TypeVar("T")
U = TypeVar("U")


def run_pytest(copy: Path, arguments: Sequence[str], log: Path, timeout: float, stop_at: str | None) -> Generator[Any]:
    """What a Recorder sends, then None."""
    import pytest
    from hypothesis.internal.conjecture import engine
    from hypothesis.internal.entropy import deterministic_PRNG

    with deterministic_PRNG():  # it warns of a generator that it makes later, when the garbage collector is frozen
        pass
    engine.MAX_SHRINKING_SECONDS = SHRINKING
    events: list[Any] = []

    def send(event: Any) -> None:
        events.append(event)
        for watch in WATCHERS:
            watch(event)

    kept = {name: module for name, module in sys.modules.items() if name.startswith(OURS)}
    forget()
    sys.path.insert(0, str(copy))
    try:
        with open(log, "w") as output, redirect_stdout(output), redirect_stderr(output), chdir(copy):
            pytest.main(["--capture=sys", *arguments], [Recorder(send, stop_at)])
    finally:
        sys.path.remove(str(copy))
        forget()
        sys.modules.update(kept)
    yield from events
    yield None


def forget() -> None:
    for name in [name for name in sys.modules if name.startswith(OURS)]:
        del sys.modules[name]


def at_once(work: Callable[[T], U], items: Sequence[T]) -> Iterator[U]:
    """Yields `work` of each item in order, one after another."""
    yield from map(work, items)

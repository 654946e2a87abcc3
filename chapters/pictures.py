"""Draws what a failing test held, as text: the requests of a step, the pages of a cache, a radix tree."""

from __future__ import annotations

import io
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

LINES = 14  # of one picture
SECONDS = 2  # for all of them: a broken tree may have no end


class TimeUpError(BaseException):
    """The time for pictures is over. Not an Exception: what draws, or is drawn, may catch those."""


def draw(frames: Iterable[Mapping[str, Any]]) -> list[str]:
    """A picture of each kind of object that these local variables hold, of the first that can be drawn; when the time
    is up, those that there are."""
    drawn: dict[str, str] = {}
    with _at_most(SECONDS):
        for name, value in (pair for variables in frames for pair in variables.items()):
            kinds = {base.__name__ for base in type(value).__mro__} & _PICTURES.keys() - drawn.keys()
            for kind in kinds if name[:1] != "@" else ():  # pytest has some names with it
                with suppress(Exception):
                    drawn[kind] = f"{name}: {_PICTURES[kind](value)}"
    return list(drawn.values())


@contextmanager
def _at_most(seconds: float) -> Iterator[None]:
    """End the block after this time, without an error. The alarm repeats, for a destructor swallows what it raises."""
    active = True

    def late(*_: object) -> None:
        if active:
            raise TimeUpError

    before = signal.signal(signal.SIGALRM, late)
    try:
        with suppress(TimeUpError):
            signal.setitimer(signal.ITIMER_REAL, seconds, seconds)
            yield
            active = False
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _batch(batch: Any) -> str:
    lines = [f"a step, tokens in all: {batch.num_tokens}"]
    for piece in batch.slices:
        text = f"request {piece.request.id}: tokens {piece.start} to {piece.stop} of {piece.request.total}"
        if piece.start >= piece.request.computed:  # not committed yet: it can be told what the slice is
            text += ", decode" if piece.is_decode else ", prefill" if piece.completes else ", chunk"
        lines.append(text)
    return _cut(lines)


def _tree(tree: Any) -> str:
    from rich.console import Console

    from phase4_radix.lab.draw import draw as drawing

    out = Console(file=io.StringIO(), width=100, color_system=None)
    out.print(drawing(tree))
    return _cut(out.file.getvalue().rstrip().split("\n"))  # type: ignore[attr-defined]


def _pages(allocator: Any) -> str:
    cells = "".join(str(min(allocator.count(page), 9) or "\u00b7") for page in range(allocator.num_pages))
    head = f"{allocator.num_free} of {allocator.num_pages} pages free; a digit is a page's reference count"
    return _cut([head, *(cells[at : at + 64] for at in range(0, len(cells), 64))])


def _tables(cache: Any) -> str:
    from phase4_radix.lab.draw import where

    return _cut(
        [
            _pages(cache.allocator),
            *(f"request {id}: {where(table) or 'no pages'}" for id, table in cache._tables.items()),
        ]
    )


def _cut(lines: list[str]) -> str:
    return "\n".join(lines if len(lines) <= LINES else [*lines[: LINES - 1], "..."])


_PICTURES: dict[str, Callable[[Any], str]] = {
    "Batch": _batch,
    "PageAllocator": _pages,
    "PagedCache": _tables,
    "RadixTree": _tree,
}

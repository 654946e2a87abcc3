"""Draws what a failing test held, as text: the requests of a step, the pages of a cache, a radix tree."""

from __future__ import annotations

import io
import signal
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any

LINES = 14  # of one picture
SECONDS = 2  # for all of them: a broken tree may have no end


def draw(frames: Iterable[Mapping[str, Any]]) -> list[str]:
    """A picture of each kind of object that these local variables hold, of the first that can be drawn."""
    drawn: dict[str, str] = {}

    def late(*_: object) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(SECONDS)
    try:
        for variables in frames:
            named = [(name, value) for name, value in variables.items() if name[:1] != "@"]  # pytest has some with it
            for name, value in named:
                for kind, picture in _PICTURES.items():
                    if (
                        kind not in drawn
                        and name[:1] != "@"
                        and any(base.__name__ == kind for base in type(value).__mro__)
                    ):
                        with suppress(Exception):
                            drawn[kind] = f"{name}: {picture(value)}"
    except TimeoutError:
        pass
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    return list(drawn.values())


def _batch(batch: Any) -> str:
    lines = [f"a step, tokens in all: {batch.num_tokens}"]
    for piece in batch.slices:
        text = f"request {piece.request.id}: tokens {piece.start} to {piece.stop} of {piece.request.total}"
        if piece.start >= piece.request.computed:  # not committed yet: it can be told what the slice is
            text += ", decode" if piece.is_decode else ", chunk" if piece.is_chunk else ", prefill"
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

"""A radix tree as a picture. It needs axes of matplotlib, and only a notebook or the book has some to give."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from phase4_radix.lab.draw import counted
from phase4_radix.radix_tree import Branch

LOCKED, KEPT, INK, GREY = "#f6d98f", "#cfe0ea", "#112233", "#556677"
MARGIN = 0.12  # of a page, beside the words


@dataclass(frozen=True, slots=True)
class Block:
    """A node as an area: as wide as its pages, as high as the leaves below it."""

    branch: Branch
    start: int  # pages above it
    row: int  # its topmost leaf
    rows: int


def blocks(branches: Iterable[Branch]) -> list[Block]:
    """The nodes side by side as they follow each other, in the order of the branches: each before those below it."""
    order = list(branches)
    starts: list[int] = []
    rows = [0] * len(order)
    path: list[int] = []  # from below the root to the last node
    for number, branch in enumerate(order):
        del path[branch.depth - 1 :]
        above = path[-1] if path else None
        starts.append(0 if above is None else starts[above] + len(order[above].pages))
        path.append(number)
        if number + 1 == len(order) or order[number + 1].depth <= branch.depth:  # a leaf
            for node in path:
                rows[node] += 1
    tops: dict[int, int] = {0: 0}  # by depth: where the next node there begins
    found = []
    for branch, start, high in zip(order, starts, rows, strict=True):
        top = tops[branch.depth - 1]
        found.append(Block(branch, start, top, high))
        tops[branch.depth - 1] = top + high
        tops[branch.depth] = top
    return found


def picture(axes: Any, branches: Iterable[Branch], describe: Callable[[Branch], str]) -> None:
    """Every path from left to right is a prefix. Nodes in use are yellow, those that are only kept are blue."""
    from matplotlib.patches import Rectangle
    from matplotlib.ticker import MaxNLocator

    laid = blocks(branches)
    end = max((block.start + len(block.branch.pages) for block in laid), default=1)
    axes.set(xlim=(0, end), ylim=(max((block.row + block.rows for block in laid), default=1), 0), yticks=[])
    axes.set_xlabel("pages from the start of the prompt")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.spines["left"].set_visible(False)
    axes.grid(visible=False)
    axes.figure.draw_without_rendering()  # from now on it is known how wide a page is
    pixels = axes.get_window_extent().width / end
    for block in laid:
        branch, width = block.branch, len(block.branch.pages)
        color = LOCKED if branch.locks else KEPT
        area = Rectangle((block.start, block.row), width, block.rows, facecolor=color, edgecolor="white", linewidth=2)
        axes.add_patch(area)
        middle = block.row + block.rows / 2
        amounts = counted(width, "page") + (f", {counted(branch.locks, 'lock')}" if branch.locks else "")
        for text, y, side, size, ink in (
            (describe(branch), middle - 0.06, "bottom", 8.5, INK),
            (amounts, middle + 0.08, "top", 7, GREY),
        ):
            fit(
                axes.text(block.start + MARGIN, y, text, va=side, fontsize=size, color=ink),
                room=(width - 2 * MARGIN) * pixels,
            )


def fit(written: Any, room: float) -> None:
    """Cut a text on axes to so many pixels; what is cut ends in an ellipsis."""
    text = written.get_text()
    while text and (width := written.get_window_extent().width) > room:
        text = text[: min(len(text) - 1, int(len(text) * room / width))].rstrip()
        written.set_text(text and f"{text}\u2026")

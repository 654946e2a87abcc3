"""Draws a radix tree on matplotlib axes, for notebooks."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from phase4_radix.lab.draw import counted
from phase4_radix.radix_tree import NodeView

LOCKED, KEPT, INK, GREY = "#f6d98f", "#cfe0ea", "#112233", "#556677"
MARGIN = 0.12  # of a page, left and right of the text


@dataclass(frozen=True, slots=True)
class Block:
    """A node as a rectangle: as wide as its pages, as high as its number of leaves."""

    node: NodeView
    start: int  # pages before it
    row: int  # of its first leaf
    rows: int


def blocks(nodes: Iterable[NodeView]) -> list[Block]:
    """Lay out the nodes, given with parents before children, without overlap: children to the right of their parent."""
    order = list(nodes)
    starts: list[int] = []
    rows = [0] * len(order)
    path: list[int] = []  # from the root, which is left out, to the last node
    for number, node in enumerate(order):
        del path[node.depth - 1 :]
        above = path[-1] if path else None
        starts.append(0 if above is None else starts[above] + len(order[above].pages))
        path.append(number)
        if number + 1 == len(order) or order[number + 1].depth <= node.depth:  # a leaf
            for ancestor in path:
                rows[ancestor] += 1
    tops: dict[int, int] = {0: 0}  # by depth: the first row of the next node
    found = []
    for node, start, high in zip(order, starts, rows, strict=True):
        top = tops[node.depth - 1]
        found.append(Block(node, start, top, high))
        tops[node.depth - 1] = top + high
        tops[node.depth] = top
    return found


def picture(axes: Any, nodes: Iterable[NodeView], describe: Callable[[NodeView], str]) -> None:
    """Draw the tree so that every path from left to right is a prefix. Locked nodes are yellow, cached ones blue."""
    from matplotlib.patches import Rectangle
    from matplotlib.ticker import MaxNLocator

    laid = blocks(nodes)
    end = max((block.start + len(block.node.pages) for block in laid), default=1)
    axes.set(xlim=(0, end), ylim=(max((block.row + block.rows for block in laid), default=1), 0), yticks=[])
    axes.set_xlabel("pages from the start of the prompt")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.spines["left"].set_visible(False)
    axes.grid(visible=False)
    axes.figure.draw_without_rendering()  # determines how many pixels a page is wide
    pixels = axes.get_window_extent().width / end
    for block in laid:
        node, width = block.node, len(block.node.pages)
        color = LOCKED if node.ref_count else KEPT
        area = Rectangle((block.start, block.row), width, block.rows, facecolor=color, edgecolor="white", linewidth=2)
        axes.add_patch(area)
        middle = block.row + block.rows / 2
        amounts = counted(width, "page") + (f", {counted(node.ref_count, 'lock')}" if node.ref_count else "")
        for text, y, side, size, ink in (
            (describe(node), middle - 0.06, "bottom", 8.5, INK),
            (amounts, middle + 0.08, "top", 7, GREY),
        ):
            fit(
                axes.text(block.start + MARGIN, y, text, va=side, fontsize=size, color=ink),
                room=(width - 2 * MARGIN) * pixels,
            )


def fit(written: Any, room: float) -> None:
    """Shorten a text on axes to `room` pixels, with an ellipsis."""
    text = written.get_text()
    while text and (width := written.get_window_extent().width) > room:
        text = text[: min(len(text) - 1, int(len(text) * room / width))].rstrip()
        written.set_text(text and f"{text}\u2026")

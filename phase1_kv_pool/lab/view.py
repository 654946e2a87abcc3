"""The page map drawn: a cell a page, coloured by its owner, filled as far as tokens go."""

import colorsys
import string
from collections.abc import Sequence
from functools import cache

from rich.color import Color
from rich.console import Console, Group, RenderableType
from rich.style import Style
from rich.table import Table
from rich.text import Text

from phase1_kv_pool.lab.page_map import Cell, PageMap, World

SYMBOLS = string.digits + string.ascii_letters  # owners where there are no colours; every 62nd shares one
COLOUR_KEY = "a cell is a page: bright where it holds tokens, dark where empty; \u00b7 is free"
PLAIN_KEY = "a cell is a page: its owner, and how full it is; \u2591 is reserved and empty, \u00b7 free"
LEFT_EIGHTHS = " \u258f\u258e\u258d\u258c\u258b\u258a\u2589\u2588"
LOWER_EIGHTHS = "\u2591\u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588"  # the first says: reserved, nothing in it
GAP = 4
ABOVE = 6  # lines above the rows of a map


def live(page_map: PageMap, console: Console) -> RenderableType:
    """The moment as a picture that fits the terminal."""
    coloured = console.color_system is not None and not console.no_color
    return picture(page_map, console.width, console.height - 1, coloured)


def picture(page_map: PageMap, width: int, height: int | None, coloured: bool) -> RenderableType:
    """Both maps side by side and those who run in the paged one. Of what is too high, the last rows are left out."""
    legend = _legend(page_map.paged, width, coloured)
    across = _cells_across(width)
    rows = -(-page_map.setting.pages // across)
    if height is not None:
        rows = min(rows, max(height - ABOVE - 3, 1))  # 3: two lines of legend and what it is
        legend = _cut(legend, max(height - ABOVE - 1 - rows, 1))
    maps = Table.grid(padding=(0, GAP, 0, 0))
    for _ in page_map.worlds:
        maps.add_column(width=(width - GAP) // 2, no_wrap=True)
    maps.add_row(*(Group(*_caption(world), *_cut(_rows(world, across, coloured), rows)) for world in page_map.worlds))
    head = f"step {page_map.steps}   {page_map.setting.trace.num_requests} requests, a token a step each"
    key = COLOUR_KEY if coloured else PLAIN_KEY
    return Group(
        Text(head, "bold", no_wrap=True),
        Text(key, "dim", no_wrap=True),
        maps,
        Text(f"running in {page_map.paged.name}:", "dim"),
        *legend,
    )


def summary(page_map: PageMap) -> RenderableType:
    """Both worlds once everyone has been served."""
    setting = page_map.setting
    head = (
        f"{setting.trace.num_requests} requests, {setting.slots:,} slots: {setting.pages} pages of {setting.page_size}"
    )
    table = Table(header_style="dim", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("given out as")
    for name in ("at most at once", "steps to the end", "preempted", "reserved slots with a token"):
        table.add_column(name, justify="right")
    for world in page_map.worlds:
        serving = world.serving
        figures = [str(n) for n in (world.most_running, serving.steps, serving.preemptions)]
        table.add_row(world.name, *figures, f"{world.utilisation:.1%}")
    return Group(Text(head, "bold"), table)


def _caption(world: World) -> list[Text]:
    c = world.counts()
    share = c.wasted / (c.tokens + c.wasted) if c.tokens + c.wasted else 0.0
    return [
        Text(world.name, "bold"),
        Text(f"{c.running} running  {c.waiting} waiting  {c.done} done"),
        Text(f"{c.used} pages used  {c.free} free  {c.preempted} preempted"),
        Text(f"{c.wasted:,} slots wasted, {share:.0%} of those used"),
    ]


def _cells_across(width: int) -> int:
    """A multiple of eight, for two maps of cells two columns wide."""
    return max((width - GAP) // 2 // 2 // 8 * 8, 8)


def _rows(world: World, across: int, coloured: bool) -> list[Text]:
    draw = _coloured if coloured else _plain
    size = world.setting.page_size
    return _lines([draw(cell, size) for cell in world.cells()], across)


def _coloured(cell: Cell | None, size: int) -> Text:
    if cell is None:
        return Text("\u00b7 ", "dim")
    full = _level(cell.tokens, size, 16)
    return Text(LEFT_EIGHTHS[min(full, 8)] + LEFT_EIGHTHS[max(full - 8, 0)], _style(cell.owner))


def _plain(cell: Cell | None, size: int) -> Text:
    if cell is None:
        return Text(" \u00b7")
    return Text(SYMBOLS[cell.owner % len(SYMBOLS)] + LOWER_EIGHTHS[_level(cell.tokens, size, 8)])


def _level(tokens: int, size: int, levels: int) -> int:
    """How full, in so many levels: the lowest is only for empty, the highest only for full."""
    if tokens in (0, size):
        return levels * (tokens == size)
    return min(max(round(tokens / size * levels), 1), levels - 1)


def _legend(world: World, width: int, coloured: bool) -> list[Text]:
    entries = []
    for live in world.serving.running:
        pages = sum(length for _, length in world.serving.memory.spans(live.request)) // world.setting.page_size
        owner = Cell(live.job.number, world.setting.page_size)
        mark = (_coloured if coloured else _plain)(owner, world.setting.page_size)
        entries.append(Text.assemble(mark, f" {live.request.id:<4}{live.tokens:>4} t{pages:>3} p "))
    return _lines(entries, max(width // len(entries[0]), 1)) if entries else []


def _lines(pieces: Sequence[Text], across: int) -> list[Text]:
    return [Text("", no_wrap=True).join(pieces[at : at + across]) for at in range(0, len(pieces), across)]


def _cut(lines: list[Text], room: int) -> list[Text]:
    """As many lines as there is room for, the last a sign that there are more."""
    return lines if len(lines) <= room else [*lines[: room - 1], Text("\u2026", "dim")]


@cache
def _style(owner: int) -> Style:
    """A colour for a request, and the same darkened for the part of its pages that is empty. Neighbours in number
    differ most: each turns the hue by the golden ratio."""
    hue, light = owner * 0.618034 % 1, (0.55, 0.68, 0.42)[owner % 3]

    def colour(lightness: float, saturation: float) -> Color:
        return Color.from_rgb(*(255 * part for part in colorsys.hls_to_rgb(hue, lightness, saturation)))

    return Style(color=colour(light, 0.75), bgcolor=colour(light * 0.35, 0.45))

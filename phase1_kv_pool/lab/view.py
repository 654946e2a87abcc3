"""Terminal view of the page map: one cell for each page, in the colour of its request, filled by its tokens."""

import colorsys
import string
from collections.abc import Sequence
from functools import cache

from rich.color import Color
from rich.console import Console, Group, RenderableType
from rich.style import Style
from rich.table import Table
from rich.text import Text

from phase1_kv_pool.lab.page_map import Cell, MemorySimulation, PageMap

SYMBOLS = string.digits + string.ascii_letters  # request symbols without colours; every 62nd request shares one
COLOUR_KEY = "a cell is a page: bright where it holds tokens, dark where empty; \u00b7 is free"
PLAIN_KEY = "a cell is a page: its request, and how full it is; \u2591 is reserved and empty, \u00b7 free"
LEFT_EIGHTHS = " \u258f\u258e\u258d\u258c\u258b\u258a\u2589\u2588"
LOWER_EIGHTHS = "\u2591\u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588"  # the first: reserved and empty
GAP = 4
ABOVE = 6  # lines above the rows of a map


def live(page_map: PageMap, console: Console) -> RenderableType:
    """The current step as a picture that fits the terminal."""
    coloured = console.color_system is not None and not console.no_color
    return picture(page_map, console.width, console.height - 1, coloured)


def picture(page_map: PageMap, width: int, height: int | None, coloured: bool) -> RenderableType:
    """Both maps side by side and the running requests of the paged one. Rows that do not fit are left out."""
    legend = _legend(page_map.paged, width, coloured)
    across = _cells_across(width)
    rows = -(-page_map.config.pages // across)
    if height is not None:
        rows = min(rows, max(height - ABOVE - 3, 1))  # 3: two lines of legend and its title
        legend = _cut(legend, max(height - ABOVE - 1 - rows, 1))
    maps = Table.grid(padding=(0, GAP, 0, 0))
    for _ in page_map.simulations:
        maps.add_column(width=(width - GAP) // 2, no_wrap=True)
    maps.add_row(*(Group(*_caption(one), *_cut(_rows(one, across, coloured), rows)) for one in page_map.simulations))
    head = f"step {page_map.steps}   {page_map.config.trace.num_requests} requests, a token a step each"
    key = COLOUR_KEY if coloured else PLAIN_KEY
    return Group(
        Text(head, "bold", no_wrap=True),
        Text(key, "dim", no_wrap=True),
        maps,
        Text(f"running in {page_map.paged.name}:", "dim"),
        *legend,
    )


def summary(page_map: PageMap) -> RenderableType:
    """A table of both simulations after the run."""
    config = page_map.config
    head = f"{config.trace.num_requests} requests, {config.slots:,} slots: {config.pages} pages of {config.page_size}"
    table = Table(header_style="dim", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("allocated in")
    for name in ("at most at once", "steps to the end", "preempted", "reserved slots with a token"):
        table.add_column(name, justify="right")
    for simulation in page_map.simulations:
        simulator = simulation.simulator
        figures = [str(n) for n in (simulation.most_running, simulator.steps, simulator.preemptions)]
        table.add_row(simulation.name, *figures, f"{simulation.utilisation:.1%}")
    return Group(Text(head, "bold"), table)


def _caption(simulation: MemorySimulation) -> list[Text]:
    c = simulation.counts()
    share = c.wasted / (c.tokens + c.wasted) if c.tokens + c.wasted else 0.0
    return [
        Text(simulation.name, "bold"),
        Text(f"{c.running} running  {c.waiting} waiting  {c.done} done"),
        Text(f"{c.used} pages used  {c.free} free  {c.preempted} preempted"),
        Text(f"{c.wasted:,} slots wasted, {share:.0%} of those used"),
    ]


def _cells_across(width: int) -> int:
    """A multiple of eight, for two maps of cells two columns wide."""
    return max((width - GAP) // 2 // 2 // 8 * 8, 8)


def _rows(simulation: MemorySimulation, across: int, coloured: bool) -> list[Text]:
    draw = _coloured if coloured else _plain
    size = simulation.config.page_size
    return _lines([draw(cell, size) for cell in simulation.cells()], across)


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
    """How full a page is, in levels. The lowest is only for empty pages, the highest only for full ones."""
    if tokens in (0, size):
        return levels * (tokens == size)
    return min(max(round(tokens / size * levels), 1), levels - 1)


def _legend(simulation: MemorySimulation, width: int, coloured: bool) -> list[Text]:
    entries = []
    for active in simulation.simulator.running:
        slots = sum(length for _, length in simulation.simulator.memory.spans(active.request))
        pages = slots // simulation.config.page_size
        owner = Cell(active.spec.number, simulation.config.page_size)
        mark = (_coloured if coloured else _plain)(owner, simulation.config.page_size)
        entries.append(Text.assemble(mark, f" {active.request.id:<4}{active.tokens:>4} t{pages:>3} p "))
    return _lines(entries, max(width // len(entries[0]), 1)) if entries else []


def _lines(pieces: Sequence[Text], across: int) -> list[Text]:
    return [Text("", no_wrap=True).join(pieces[at : at + across]) for at in range(0, len(pieces), across)]


def _cut(lines: list[Text], room: int) -> list[Text]:
    """The lines that fit; the last one is an ellipsis if there are more."""
    return lines if len(lines) <= room else [*lines[: room - 1], Text("\u2026", "dim")]


@cache
def _style(owner: int) -> Style:
    """The colour of a request, and a darker one for the empty part of its pages.

    The hue turns by the golden ratio from one request to the next, so that consecutive requests differ most.
    """
    hue, light = owner * 0.618034 % 1, (0.55, 0.68, 0.42)[owner % 3]

    def colour(lightness: float, saturation: float) -> Color:
        return Color.from_rgb(*(255 * part for part in colorsys.hls_to_rgb(hue, lightness, saturation)))

    return Style(color=colour(light, 0.75), bgcolor=colour(light * 0.35, 0.45))

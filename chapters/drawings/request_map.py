"""The map of a chat request: a column per phase, a row per module of the table in map.md."""

import itertools
import re
from pathlib import Path
from typing import NamedTuple

from chapters.drawings.svg import Drawing

MAP = Path(__file__).parent.parent / "map.md"
NAMES = ("request", "KV pool", "compute", "chunking", "prefix cache", "scheduling", "serving")
LEFT, COLUMN, TOP, ROW = 84, 112, 58, 28


class Stop(NamedTuple):
    """A row of the table in map.md: one module on the way of a chat request."""

    process: str
    phase: int
    module: str
    path: str


def stops(page: Path = MAP) -> list[Stop]:
    """The rows of the table in map.md, in order."""
    row = re.compile(r"^\| (server|engine) \| (\d) \| \[(\w+)\]\(\.\./([^)]+)\) \| [^|]+ \|$", re.MULTILINE)
    return [
        Stop(process, int(phase), name, path) for process, phase, name, path in row.findall(page.read_text("utf-8"))
    ]


def request_map(page: Path = MAP) -> Drawing:
    """A column per phase, a row per module, and a line along the request's way."""
    way = stops(page)
    drawing = Drawing(TOP + ROW * len(way) + 12, "The way of a chat request through the modules of each phase", 880)
    x = [LEFT + (6 - stop.phase) * COLUMN + COLUMN / 2 for stop in way]
    y = [TOP + ROW * number + ROW / 2 for number in range(len(way))]
    for process, group in itertools.groupby(range(len(way)), key=lambda number: way[number].process):
        rows = list(group)
        top = TOP + ROW * rows[0]
        drawing.rect(8, top, 864, ROW * len(rows), "faint" if process == "server" else "pale", radius=0)
        drawing.text(18, top + 19, process, "ink", 15, bold=True)
        drawing.text(18, top + 36, "process", "soft", 13)
    for phase, name in enumerate(NAMES):
        middle = LEFT + (6 - phase) * COLUMN + COLUMN / 2
        drawing.text(middle, 26, f"{phase}", "ink", 17, "middle", bold=True)
        drawing.text(middle, 46, name, "soft", 15, "middle")
    drawing.path("M" + " L".join(f"{a:g} {b:g}" for a, b in zip(x, y, strict=True)), "red")
    for stop, a, b in zip(way, x, y, strict=True):
        drawing.cell(a - 54, b - 11, 108, 22, stop.module, "blue", "on", 12.5)
    return drawing

"""Tables of figures. `<!-- generated: table NAME -->` in a document owns one; `tables/DOCUMENT.toml` describes it:

    [cache]
    file = "phase4.json"
    head = "| | hit rate | mean TTFT |"
    row = "| $1 | {served.$2.hit_rate .0%} | {served.$2.ttft_ms .1f} ms |"
    rows = [["cache off", "off"], ["cache on", "on"]]

`{KEY FORMAT}` is a figure of `file`, `{other.json#KEY FORMAT}` one of another result. `$1` is the first text of a row.
Without `row`, `rows` are the lines themselves.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from chapters.claims import figures
from chapters.course import CourseError

FIGURE = re.compile(r"\{(\S+) (\S+)\}")
MEASURED = re.compile(r"<!-- measured: (\S+) ")
TABLE = re.compile(r"<!-- generated: table (\S+) -->")


def shown(results: Path, what: str) -> str:
    """A figure, or a text, of a result in its format: `file.json#dotted.key FORMAT`."""
    reference, _, spec = what.partition(" ")
    file, _, key = reference.partition("#")
    (value,) = figures(results / file, key)[:1]
    try:
        return format(value, spec)
    except ValueError as error:
        raise CourseError(f"'{spec}' cannot format {value!r} at '{key}' of {file}: {error}") from None


def table(chapters: Path, document: str, name: str) -> list[str]:
    """The lines of this table of a document."""
    head, *rows = (
        FIGURE.sub(lambda figure: shown(chapters / "results", f"{figure[1]} {figure[2]}"), line)
        for line in lines(chapters, document, name)
    )
    return [head, "|---" * (head.count("|") - 1) + "|", *rows]


def lines(chapters: Path, document: str, name: str) -> list[str]:
    """The head and the rows of a table, with `{file.json#KEY FORMAT}` in place of each figure."""
    path = chapters / "tables" / f"{document}.toml"
    known: dict[str, Any] = tomllib.loads(path.read_text("utf-8")) if path.is_file() else {}
    if name not in known:
        raise CourseError(f"{path.name} has no table {name!r}; it has {', '.join(known) or 'none'}")
    its, rows = known[name], known[name].get("rows", [])
    try:
        if "row" in its:
            rows = [_filled(its["row"], row) for row in rows]
        named = (re.sub(r"\{(?=[^#\s}]+ )", f"{{{its['file']}#", line) for line in (its["head"], *rows))
        return [re.sub(r"(?<=\|) +(?=\|)", " ", line) for line in named]
    except (KeyError, IndexError, TypeError) as error:
        raise CourseError(f"table {name!r} of {path.name}: {error!r}") from None


def _filled(row: str, texts: Sequence[str]) -> str:
    return re.sub(r"\$(\d)", lambda number: texts[int(number[1]) - 1], row)


def quoted(text: str, chapters: Path, document: str) -> list[str]:
    """The figures that a document, or a part of it, shows: `file.json#dotted.key` of each."""
    tables = (line for name in TABLE.findall(text) for line in lines(chapters, document, name))
    return [*MEASURED.findall(text), *(key for line in tables for key, _ in FIGURE.findall(line))]

"""What every benchmark prints and writes: tables of figures, and a JSON file with the machine that made them."""

import argparse
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from phase0_request.lab.record import record
from phase0_request.support.machine import describe


def table(names: Sequence[str], rows: Iterable[Sequence[object]], digits: int = 1, title: str | None = None) -> Table:
    """A table of figures: texts on the left, numbers on the right, floats below 1,000 with `digits` digits."""
    cells = [list(row) for row in rows]
    gap = 1 if len(names) > 7 else 2
    drawn = Table(
        title=title, title_justify="left", header_style="dim", box=None, pad_edge=False, padding=(0, gap, 0, 0)
    )
    for column, name in enumerate(names):
        words = any(isinstance(row[column], str) for row in cells)
        drawn.add_column(name, justify="left" if words else "right", no_wrap=True)
    for row in cells:
        drawn.add_row(*(_cell(value, digits) for value in row))
    return drawn


def section(
    console: Console, title: str, rows: Mapping[str, Any], digits: int = 1, shown: Sequence[str] = ()
) -> dict[str, dict[str, Any]]:
    """Print rows, dataclasses or dictionaries by name, as a table of their fields, or of those that are to be `shown`.
    Returns all their figures."""
    figures = {name: row if isinstance(row, dict) else asdict(row) for name, row in rows.items()}
    columns = shown or [*next(iter(figures.values()))]
    cells = [(name.replace("_", " "), *(row[column] for column in columns)) for name, row in figures.items()]
    console.print(title)
    console.print(table(("", *(column.replace("_", "\n") for column in columns)), cells, digits), "")
    return figures


def _cell(value: object, digits: int) -> str:
    if isinstance(value, float):
        return f"{value:,.{digits if abs(value) < 1000 else 0}f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def parser(name: str, about: str | None) -> argparse.ArgumentParser:
    """The command line of a benchmark, `name` being "phaseN_x.lab NAME". It has --json."""
    form = argparse.RawDescriptionHelpFormatter
    p = argparse.ArgumentParser(prog=f"python -m {name}", description=about, formatter_class=form)
    p.add_argument("--json", type=Path, metavar="FILE", help="write the figures here")
    return p


def at_least_one(text: str) -> int:
    """The type of a flag that counts something."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be an integer from 1, got {text!r}")
    return int(text)


def add_fields(p: argparse._ActionsContainer, defaults: object, fields: Mapping[str, str]) -> None:
    """A flag for each of these fields of an object, with the field's value as its default. The texts are its help."""
    for name, about in fields.items():
        value = getattr(defaults, name)
        help_text = f"{about} (%(default)s)" if about else "(%(default)s)"
        p.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value, help=help_text)


def finish(
    p: argparse.ArgumentParser,
    options: argparse.Namespace,
    arguments: Sequence[str] | None,
    figures: Mapping[str, Any],
    *,
    gpu: bool = False,
    console: Console | None = None,
) -> None:
    """Write the figures, if a file was named, with the command that repeats them and the device that computed."""
    if options.json is None:
        return
    machine, given = describe(), sys.argv[2:] if arguments is None else arguments
    record(options.json, " ".join([p.prog, *given]), figures, device=machine.gpu if gpu else machine.cpu)
    (console or Console()).print(f"\nFigures written to {options.json}", highlight=False)

"""`python -m phase5_continuous.lab capstone FILE`: score a policy of your own beside ours, for the leaderboard.

FILE is a Python module that defines one or more of:

    policy() -> Policy                       the order within a tenant, and which request is preempted
    cache(pages, page_size) -> PagedCache       the pages: a PrefixCache with another eviction order, for example
    share() -> FairShare                     the order of the tenants
"""

import argparse
import json
import runpy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track

from phase0_request.lab.report import table
from phase5_continuous.lab.contest import GOAL, OURS, SHARES, Entry, EntryError, score

LEADERBOARD = Path(__file__).parents[2] / "chapters" / "leaderboard.json"
HOOKS = ("policy", "cache", "share")
Row = Mapping[str, float]


def load(path: Path) -> Entry:
    """Read an entry from a file, which runs it. EntryError says what is missing."""
    if not path.is_file():
        raise EntryError(f"there is no file {path}")
    hooks = {name: value for name, value in runpy.run_path(str(path)).items() if name in HOOKS}
    if not hooks or not all(map(callable, hooks.values())):
        raise EntryError(f"{path.name} must define at least one of the functions {', '.join(HOOKS)}")
    if path.stem in (entry.name for entry in OURS):
        raise EntryError(f"{path.stem} is one of ours; give the file another name")
    return Entry(path.stem, **hooks)


def read(path: Path) -> dict[str, dict[str, float]]:
    """The rows of a leaderboard, by name; none if there is no file."""
    rows: dict[str, dict[str, float]] = json.loads(path.read_text("utf-8"))["rows"] if path.is_file() else {}
    return rows


def write(path: Path, rows: Mapping[str, Row]) -> None:
    """Write the rows, the best first."""
    ordered = dict(sorted(rows.items(), key=lambda item: -item[1]["score"]))
    path.write_text(json.dumps({"rows": ordered}, indent=2) + "\n", "utf-8")


def markdown(rows: Mapping[str, Row]) -> str:
    """The table of the book's page."""
    lines = [["entry", "score", *SHARES, "longest wait"], ["---"] * (len(SHARES) + 3)]
    for name, row in sorted(rows.items(), key=lambda item: -item[1]["score"]):
        shares = [f"{row[share]:.0%}" for share in SHARES]
        lines.append([name, f"{row['score']:.1f}", *shares, f"{row['longest wait']:.1f} s"])
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def main(arguments: list[str] | None = None) -> int:
    p = argparse.ArgumentParser(
        prog="python -m phase5_continuous.lab capstone",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.add_argument("file", type=Path, nargs="?", metavar="FILE", help="your policy; without it, ours are scored again")
    p.add_argument("--leaderboard", type=Path, default=LEADERBOARD, metavar="JSON", help="(chapters/leaderboard.json)")
    options, console = p.parse_args(arguments), Console()
    try:
        entry = None if options.file is None else load(options.file)
        rows: dict[str, Any] = read(options.leaderboard)
        for entered in track(OURS if entry is None else [entry], "simulating", console=console, transient=True):
            rows[entered.name] = score(entered)
        write(options.leaderboard, rows)
        slo = f"first token in {GOAL.ttft:g} s, p99 between tokens {GOAL.gap * 1e3:g} ms"
        title = f"Requests that met the SLO, simulated ({slo})"
        ordered = sorted(rows.items(), key=lambda item: -item[1]["score"])
        columns = ("", "score", *(name.replace(" ", "\n") for name in SHARES), "longest\nwait")
        cells = [
            (name, row["score"], *(f"{row[share]:.0%}" for share in SHARES), f"{row['longest wait']:.1f} s")
            for name, row in ordered
        ]
        console.print(table(columns, cells, title=title))
    except EntryError as error:
        p.error(str(error))
    return 0

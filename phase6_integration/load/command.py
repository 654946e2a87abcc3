"""Run a load with a progress bar, then print the table or write the JSON."""

import json
from pathlib import Path

import uvloop
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from phase6_integration.load.client import Load, run
from phase6_integration.load.report import Report
from phase6_integration.load.response import Outcome


def execute(load: Load, file: str | None) -> int:
    """The exit code: 0 if any request succeeded, 1 if none did. `file` gets the figures; - is the standard output."""
    report = uvloop.run(_with_progress(load))
    text = json.dumps(report.as_json(), indent=2, allow_nan=False)
    if file == "-":
        print(text)
    else:
        Console().print(report.table())
        if file is not None:
            Path(file).write_text(text + "\n", encoding="utf-8")
    return 0 if report.completed else 1


async def _with_progress(load: Load) -> Report:
    """The bar is on stderr, if that is a terminal, and drawn seldom: drawing takes processor time from the server."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(
        *columns, console=console, transient=True, refresh_per_second=2, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task("requests", total=load.workload.num_prompts)

        def ended(_: Outcome) -> None:
            bar.advance(task)

        return await run(load, ended)

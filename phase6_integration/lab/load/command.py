"""The command: progress while the load runs, the table or the JSON after it. Its flags are in `cli.bench_command`."""

import json
import sys
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import uvloop
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from phase6_integration.http_client import LostError, RefusedError, Target, UnreachableError
from phase6_integration.lab.load.answer import Outcome
from phase6_integration.lab.load.client import Load, run
from phase6_integration.lab.load.report import Bounds, Report
from phase6_integration.lab.load.workload import Workload


def load_of(given: Mapping[str, Any]) -> Load:
    """From what the command line gives. ValueError names the option that is wrong."""
    workload, load = (
        {field.name: given[field.name] for field in fields(kind) if field.name in given} for kind in (Workload, Load)
    )
    return Load(
        target=Target.of(given["url"], given["api_key"]),
        workload=Workload(**workload),
        bounds=Bounds.of(given.get("goodput", ())),
        **load,
    )


def execute(load: Load, file: str | None, name: str) -> int:
    """0 if any request was answered, 1 if none was or the server cannot be used. `file` gets the figures."""
    try:
        done = uvloop.run(_watched(load))
    except (UnreachableError, LostError, RefusedError) as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"{name}: stopped", file=sys.stderr)
        return 130
    text = json.dumps(done.as_json(), indent=2, allow_nan=False)
    if file == "-":
        print(text)
    else:
        Console().print(done.table())
        if file is not None:
            Path(file).write_text(text + "\n", encoding="utf-8")
    return 0 if done.completed else 1


async def _watched(load: Load) -> Report:
    """With a bar on the error stream, if that is a terminal. It is drawn seldom: drawing takes time from the load."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(
        *columns, console=console, transient=True, refresh_per_second=2, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task("requests", total=load.workload.num_prompts)

        def ended(outcome: Outcome) -> None:
            bar.advance(task)

        return await run(load, ended)

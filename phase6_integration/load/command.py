"""The command: its options, the progress while it runs, the table or the JSON after it."""

import argparse
import json
import os
import sys
from pathlib import Path

import uvloop
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from phase6_integration.load.answer import Outcome
from phase6_integration.load.client import Load, RefusedError, run
from phase6_integration.load.http import LostError, Target, UnreachableError
from phase6_integration.load.report import Bounds, Report
from phase6_integration.load.workload import KINDS, Workload

DESCRIPTION = "Put a server under load and measure it. The prompts are token ids, so that their lengths are exact."
KEY = "NANOSERVE_API_KEY"  # where a key may stand, as well as in --api-key


def add_arguments(p: argparse.ArgumentParser) -> None:
    """The options, with their defaults from Workload and Load."""
    w = Workload()
    p.add_argument("--url", default="http://127.0.0.1:8000", help="of the server (%(default)s)")
    p.add_argument("--model", help="its name there (the first that the server names)")
    p.add_argument("--api-key", default=os.environ.get(KEY), help=f"(the environment's {KEY}, if it has one)")
    kinds = "; ".join(f"{name}: {meaning}" for name, meaning in KINDS.items())
    p.add_argument("--workload", dest="kind", choices=KINDS, default=w.kind, help=f"{kinds} (%(default)s)")
    p.add_argument("-n", "--num-prompts", type=int, default=w.num_prompts, help="requests (%(default)s)")
    p.add_argument(
        "--request-rate", type=float, default=w.request_rate, help="requests a second on average; inf: at once (inf)"
    )
    p.add_argument("-c", "--concurrency", "--max-concurrency", type=int, help="requests at a time, at most (all)")
    for name, words in (
        ("input-len", "tokens of a prompt"),
        ("output-len", "tokens of an answer"),
        ("max-input-len", "long-tail: the longest prompt"),
        ("max-output-len", "long-tail: the longest answer"),
        ("prefix-len", "shared-prefix: tokens before each prompt"),
        ("num-prefixes", "shared-prefix: different ones"),
        ("seed", "of times, lengths and prompts"),
    ):
        default = getattr(w, name.replace("-", "_"))
        p.add_argument(f"--{name}", type=int, default=default, help=f"{words} (%(default)s)")
    p.add_argument("--spread", type=float, default=w.spread, help="long-tail: of a length's logarithm (%(default)s)")
    p.add_argument("--temperature", type=float, default=0.0, help="(%(default)s)")
    p.add_argument("--no-stream", dest="stream", action="store_false", help="ask for whole answers")
    p.add_argument("--num-warmups", type=int, default=1, help="requests before, which do not count (%(default)s)")
    p.add_argument("--timeout", type=float, default=600.0, help="seconds for one request (%(default)g)")
    p.add_argument(
        "--goodput", nargs="+", default=[], metavar="NAME:MS", help="what a good request keeps: ttft:500 itl:50"
    )
    p.add_argument("--json", metavar="FILE", help="write the figures there; - is the standard output, without a table")


def load_of(options: argparse.Namespace) -> Load:
    """ValueError names the option that is wrong."""
    names = Workload.__slots__
    return Load(
        target=Target.of(options.url, options.api_key),
        workload=Workload(**{name: getattr(options, name) for name in names}),
        model=options.model,
        concurrency=options.concurrency,
        stream=options.stream,
        temperature=options.temperature,
        warmups=options.num_warmups,
        timeout=options.timeout,
        bounds=Bounds.of(options.goodput),
    )


def execute(options: argparse.Namespace) -> int:
    """0 if any request was answered, 1 if none was or the server cannot be used, 2 for options that make no sense."""
    try:
        load = load_of(options)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    try:
        done = uvloop.run(_watched(load))
    except (UnreachableError, LostError, RefusedError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("Stopped.", file=sys.stderr)
        return 130
    text = json.dumps(done.as_json(), indent=2, allow_nan=False)
    if options.json == "-":
        print(text)
    else:
        Console().print(done.table())
        if options.json:
            Path(options.json).write_text(text + "\n", encoding="utf-8")
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


def main(arguments: list[str] | None = None) -> int:
    p = argparse.ArgumentParser(prog="python -m phase6_integration.load", description=DESCRIPTION)
    add_arguments(p)
    return execute(p.parse_args(arguments))

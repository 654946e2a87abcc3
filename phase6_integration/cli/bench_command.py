"""`nanoserve bench serve`: put a server under load and measure it. The load generator is `load`; its dataclasses define
the flags. The figures have the names of `vllm bench serve`."""

import argparse
import asyncio
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from phase0_request.support.flags import Parser, add_fields, values_of
from phase6_integration.cli.common import add_server, api_key, server_url

if TYPE_CHECKING:
    from phase6_integration.load.client import LoadTest
    from phase6_integration.load.report import Report
    from phase6_integration.load.response import Outcome

TELL = 5.0  # seconds between two lines of progress, where there is no terminal


def add_flags(parser: Parser) -> None:
    from phase6_integration.load.client import LoadTest
    from phase6_integration.load.workload import Workload

    parser.usage = "nanoserve bench [serve] [flags]"
    parser.description = (
        "Put a server with OpenAI's API under load and measure it. Prompts are token ids and answers run to "
        "max_tokens, so lengths are exact; a chat gets words. The server's usage counts the tokens. With a request "
        "rate, or times in a trace, the loop is open, and latencies count from the planned arrival. Without a "
        "server: `nanoserve bench compare` runs this engine beside others, `nanoserve bench ladder` one trace "
        "through the phases' engines."
    )
    workload, client = parser.add_argument_group("workload"), parser.add_argument_group("client")
    add_fields(workload, Workload)
    add_server(client, default="http://127.0.0.1:8000")
    add_fields(client, LoadTest)
    client.add_argument("--goodput", nargs="+", metavar="NAME:MS", help="SLOs on ttft, tpot, itl or e2el, in ms (none)")
    client.add_argument(
        "--json", metavar="FILE", help="write the figures; - is the standard output, without a table (none)"
    )
    client.add_argument("--html", metavar="FILE", help="write a page with the figures and plots (none)")


def run(given: argparse.Namespace, parser: Parser) -> int:
    """0 if any request succeeded, 1 if none did. All arguments are checked, and the file is opened, before the load
    starts."""
    from rich.console import Console

    from phase6_integration.load.client import LoadTest
    from phase6_integration.load.report import SLO
    from phase6_integration.load.workload import Workload

    options = vars(given)
    file, page = options.get("json"), options.get("html")
    try:
        load = LoadTest(
            url=server_url(options["url"]),
            api_key=api_key(options),
            workload=Workload(**values_of(options, Workload)),
            slo=SLO.of(options.get("goodput", ())),
            **{name: value for name, value in values_of(options, LoadTest).items() if name not in ("url", "api_key")},
        )
        for written in (file, page):
            if written not in (None, "-"):
                open(written, "a").close()
    except (ValueError, OSError) as error:
        parser.error(str(error))
    try:
        report = _measured(load)
        text = json.dumps(report.as_json(), indent=2, allow_nan=False)
        if file == "-":
            print(text)
        else:
            Console().print(report.table())
        if file not in (None, "-"):
            Path(file).write_text(text + "\n", encoding="utf-8")
        if page is not None:
            from phase6_integration.load.page import page as html

            Path(page).write_text(html(report, load.url), encoding="utf-8")
    except (ValueError, OSError) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 1
    return 0 if report.completed else 1


def _measured(load: "LoadTest") -> "Report":
    """Run the load, and show on stderr how far it is: a bar, or lines if that is no terminal. Both come seldom: they
    take time from the server."""
    import uvloop
    from rich.console import Console
    from rich.progress import Progress

    from phase6_integration.load.client import run

    console = Console(stderr=True)
    with Progress(console=console, transient=True, refresh_per_second=2, disable=not console.is_terminal) as bar:
        task, failed = bar.add_task("requests", total=None), 0

        def ended(outcome: "Outcome", count: int) -> None:
            nonlocal failed
            failed += outcome.error is not None
            bar.update(task, advance=1, total=count)

        async def lines() -> None:
            while not console.is_terminal:
                await asyncio.sleep(TELL)
                done = bar.tasks[task]
                words = f"{done.completed:.0f} of {done.total or 0:.0f} requests, {failed} failed"
                print(words if done.total else "no answer yet", file=sys.stderr, flush=True)

        async def whole() -> "Report":
            telling = asyncio.create_task(lines())
            try:
                return await run(load, ended)
            finally:
                telling.cancel()

        return uvloop.run(whole())

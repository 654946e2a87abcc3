"""`nanoserve bench`: put a server under load and measure it. The load generator is `load`; its dataclasses define
the flags. The figures have the names of `vllm bench serve`."""

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from phase6_integration.cli.common import add_server, api_key, server_url
from phase6_integration.engine.flags import Parser, add_fields, values_of

if TYPE_CHECKING:
    from phase6_integration.load.client import LoadTest
    from phase6_integration.load.report import Report


def add_flags(parser: Parser) -> None:
    from phase6_integration.load.client import LoadTest
    from phase6_integration.load.workload import Workload

    parser.usage = "nanoserve bench [flags]"
    parser.description = (
        "Put a server under load and measure it. Prompts are token ids and answers run to max_tokens, so lengths are "
        "exact. Output tokens are counted by the server's usage. Without a server: `nanoserve bench ladder` runs one "
        "trace through the engines of phases 2 to 6 and transformers; see its --help."
    )
    workload, client = parser.add_argument_group("workload"), parser.add_argument_group("client")
    add_fields(workload, Workload)
    add_server(client, default="http://127.0.0.1:8000")
    add_fields(client, LoadTest)
    client.add_argument("--goodput", nargs="+", metavar="NAME:MS", help="SLOs on ttft, tpot, itl or e2el, in ms (none)")
    client.add_argument(
        "--json", metavar="FILE", help="write the figures; - is the standard output, without a table (none)"
    )


def run(given: argparse.Namespace, parser: Parser) -> int:
    """0 if any request succeeded, 1 if none did. All arguments are checked, and the file is opened, before the load
    starts."""
    from rich.console import Console

    from phase6_integration.load.client import LoadTest
    from phase6_integration.load.report import SLO
    from phase6_integration.load.workload import Workload

    options = vars(given)
    file = options.get("json")
    try:
        load = LoadTest(
            url=server_url(options["url"]),
            api_key=api_key(options),
            workload=Workload(**values_of(Workload, options)),
            slo=SLO.of(options.get("goodput", ())),
            **{name: value for name, value in values_of(LoadTest, options).items() if name not in ("url", "api_key")},
        )
        if file not in (None, "-"):
            open(file, "a").close()
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
    except (ValueError, OSError) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 1
    return 0 if report.completed else 1


def _measured(load: "LoadTest") -> "Report":
    """Run the load, with a bar on stderr if that is a terminal. It is drawn seldom: that takes time from the server."""
    import uvloop
    from rich.console import Console
    from rich.progress import Progress

    from phase6_integration.load.client import run

    console = Console(stderr=True)
    with Progress(console=console, transient=True, refresh_per_second=2, disable=not console.is_terminal) as bar:
        task = bar.add_task("requests", total=load.workload.num_prompts)
        return uvloop.run(run(load, lambda _: bar.advance(task)))

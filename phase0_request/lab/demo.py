"""`python -m phase0_request`: watch requests pass through a server with a mock model."""

import argparse
import asyncio
from pathlib import Path

from rich.console import Console
from rich.live import Live

from phase0_request.lab import view
from phase0_request.lab.clients import Demo, DemoConfig


def parser() -> argparse.ArgumentParser:
    """The command line. Its defaults are those of DemoConfig."""
    default = DemoConfig()
    p = argparse.ArgumentParser(prog="python -m phase0_request", description=__doc__)
    p.add_argument(
        "-n", "--num-requests", type=int, default=default.num_requests, help="how many clients (%(default)s)"
    )
    p.add_argument("-b", "--batch-size", type=int, default=default.batch_size, help="requests in a step (%(default)s)")
    p.add_argument(
        "--arrival-rate",
        type=float,
        default=default.arrival_rate,
        metavar="R",
        help="clients a second, at random times; 0: all at once (%(default)s)",
    )
    p.add_argument("--queue-limit", type=int, default=default.queue_limit, help="most waiting requests (%(default)s)")
    p.add_argument("--max-tokens", type=int, default=default.max_tokens, help="of an answer (%(default)s)")
    p.add_argument("--seed", type=int, default=default.seed, help="of questions and arrival times (%(default)s)")
    p.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        help="write a trace of all requests; a name ending in .chrome.json opens in Perfetto",
    )
    return p


async def run(demo: Demo, console: Console) -> None:
    """Run the demo, with a live view on a terminal, and print the results."""
    if console.is_terminal:
        with Live(console=console, auto_refresh=False, transient=True) as screen:
            summary = await demo.run(
                lambda: screen.update(view.live(demo, console.width, console.height), refresh=True)
            )
    else:
        summary = await demo.run()
    console.print(view.results(demo, console.width), "", view.figures(summary), sep="\n")


def main(arguments: list[str] | None = None, prog: str = "python -m phase0_request") -> int:
    p = parser()
    p.prog = prog
    options = vars(p.parse_args(arguments))
    trace_file: Path | None = options.pop("trace")
    console = Console()
    try:
        try:
            if trace_file is not None:
                trace_file.touch()  # fail before the run if the file cannot be written
            demo = Demo.of(DemoConfig(**options))
        except (ValueError, OSError) as error:
            p.error(str(error))
        asyncio.run(run(demo, console))
        if trace_file is not None:
            written = demo.server.trace.write(trace_file)
            console.print(f"\nTrace of {written} requests written to {trace_file}", highlight=False)
    except KeyboardInterrupt:
        console.print("Stopped. The requests still running were aborted.")
        return 130
    return 0

"""`python -m phase1_kv_pool`: watch page allocation, beside the same memory in contiguous blocks."""

import argparse
import time

from rich.console import Console
from rich.live import Live

from phase1_kv_pool.lab import view
from phase1_kv_pool.lab.page_map import PageMap, PageMapConfig
from phase1_kv_pool.lab.serving import SyntheticTrace

FRAMES_PER_SECOND = 30
SNAPSHOTS = 3


def parser() -> argparse.ArgumentParser:
    """The command line. Its defaults are those of PageMapConfig."""
    default = PageMapConfig()
    trace = default.trace
    p = argparse.ArgumentParser(prog="python -m phase1_kv_pool", description=__doc__)
    p.add_argument("--pages", type=int, default=default.pages, help="in the memory (%(default)s)")
    p.add_argument("--page-size", type=int, default=default.page_size, help="tokens in a page (%(default)s)")
    p.add_argument("-n", "--num-requests", type=int, default=trace.num_requests, help="(%(default)s)")
    p.add_argument(
        "--arrival-rate",
        type=float,
        default=trace.arrival_rate,
        metavar="R",
        help="requests a step, at random times; 0: all at once (%(default)s)",
    )
    p.add_argument("--max-context", type=int, default=trace.max_context, help="longest request (%(default)s)")
    p.add_argument("--median-prompt", type=int, default=trace.median_prompt, help="in tokens (%(default)s)")
    p.add_argument("--mean-answer", type=int, default=trace.mean_answer, help="in tokens (%(default)s)")
    p.add_argument("--seed", type=int, default=trace.seed, help="of lengths and arrival times (%(default)s)")
    p.add_argument(
        "--steps-per-second",
        type=float,
        default=default.steps_per_second,
        metavar="S",
        help="on a terminal; elsewhere it does not wait (%(default)s)",
    )
    return p


def animate(page_map: PageMap, console: Console) -> None:
    """Draw every step, or several steps for each picture if the rate is above FRAMES_PER_SECOND."""
    rate = page_map.config.steps_per_second
    steps_per_frame = max(1, round(rate / FRAMES_PER_SECOND))
    due = time.monotonic()
    with Live(console=console, auto_refresh=False, transient=True) as screen:
        while page_map.going:
            for _ in range(steps_per_frame):
                page_map.step()
            screen.update(view.live(page_map, console), refresh=True)
            due += steps_per_frame / rate
            time.sleep(max(due - time.monotonic(), 0))


def snapshots(page_map: PageMap, console: Console) -> None:
    """Print a few pictures as plain text, each after another quarter of the requests has finished."""
    total = page_map.config.trace.num_requests
    due = sorted({total * part // (SNAPSHOTS + 1) for part in range(1, SNAPSHOTS + 1)})
    while page_map.going:
        page_map.step()
        if due and len(page_map.paged.simulator.done) >= due[0]:
            del due[0]
            console.print(view.picture(page_map, console.width, None, coloured=False), "", sep="\n")


def main(arguments: list[str] | None = None) -> int:
    p = parser()
    options = vars(p.parse_args(arguments))
    try:
        own = {name: options.pop(name) for name in ("pages", "page_size", "steps_per_second")}
        page_map = PageMap(PageMapConfig(**own, trace=SyntheticTrace(**options)))
    except ValueError as error:
        p.error(str(error))
    console = Console()
    try:
        (animate if console.is_terminal else snapshots)(page_map, console)
        page_map.finish()
    except KeyboardInterrupt:
        console.print(f"Stopped at step {page_map.steps}.", highlight=False)
        return 130
    console.print(view.summary(page_map))
    return 0

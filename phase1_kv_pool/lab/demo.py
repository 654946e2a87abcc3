"""`python -m phase1_kv_pool`: watch pages change hands, beside the same memory given out in blocks of the longest."""

import argparse
import time

from rich.console import Console
from rich.live import Live

from phase1_kv_pool.lab import view
from phase1_kv_pool.lab.page_map import PageMap, Setting
from phase1_kv_pool.lab.serving import Trace

FRAMES_PER_SECOND = 30
SNAPSHOTS = 3


def parser() -> argparse.ArgumentParser:
    """The command line, with its defaults from Setting."""
    default = Setting()
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
        help="requests a step, at random moments; 0: all at once (%(default)s)",
    )
    p.add_argument("--max-context", type=int, default=trace.max_context, help="longest request (%(default)s)")
    p.add_argument("--median-prompt", type=int, default=trace.median_prompt, help="in tokens (%(default)s)")
    p.add_argument("--mean-answer", type=int, default=trace.mean_answer, help="in tokens (%(default)s)")
    p.add_argument("--seed", type=int, default=trace.seed, help="of lengths and moments (%(default)s)")
    p.add_argument(
        "--steps-per-second",
        type=float,
        default=default.steps_per_second,
        metavar="S",
        help="on a terminal; elsewhere time is not waited for (%(default)s)",
    )
    return p


def animate(page_map: PageMap, console: Console) -> None:
    """Draw the steps as they come, several to a picture if they come too fast for the eye."""
    rate = page_map.setting.steps_per_second
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
    """A few moments as plain text: each time another quarter of the requests has been served."""
    everyone = page_map.setting.trace.num_requests
    due = sorted({everyone * part // (SNAPSHOTS + 1) for part in range(1, SNAPSHOTS + 1)})
    while page_map.going:
        page_map.step()
        if due and len(page_map.paged.serving.done) >= due[0]:
            del due[0]
            console.print(view.picture(page_map, console.width, None, coloured=False), "", sep="\n")


def main(arguments: list[str] | None = None) -> int:
    p = parser()
    options = vars(p.parse_args(arguments))
    try:
        own = {name: options.pop(name) for name in ("pages", "page_size", "steps_per_second")}
        page_map = PageMap(Setting(**own, trace=Trace(**options)))
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

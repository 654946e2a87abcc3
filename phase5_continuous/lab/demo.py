"""`python -m phase5_continuous`: watch the batch change: requests wait, prefill, decode and are preempted.

Scheduler and memory are those of the engine. Step times are what the cost model predicts for an 8B model on one GPU.
"""

import argparse
import time

from rich.console import Console
from rich.live import Live

from phase5_continuous.lab import view
from phase5_continuous.lab.traces import KINDS
from phase5_continuous.lab.world import Show, World
from phase5_continuous.policies import POLICIES

FRAMES_PER_SECOND = 30
SNAPSHOTS = 3


def parser() -> argparse.ArgumentParser:
    """The command line, with its defaults from Show."""
    default = Show()
    p = argparse.ArgumentParser(prog="python -m phase5_continuous", description=__doc__)
    p.add_argument("--policy", choices=POLICIES, default=default.policy, help="(%(default)s)")
    p.add_argument("--kind", choices=KINDS, default=default.kind, help="of arrivals (%(default)s)")
    p.add_argument("-n", "--requests", type=int, default=default.requests, help="(%(default)s)")
    p.add_argument("--rate", type=float, default=default.rate, help="requests a second (%(default)s)")
    p.add_argument("--pages", type=int, default=default.pages, help="in the memory (%(default)s)")
    p.add_argument("--page-size", type=int, default=default.page_size, help="tokens in a page (%(default)s)")
    p.add_argument("--max-running", type=int, default=default.max_running, help="requests (%(default)s)")
    p.add_argument("--chunk", type=int, default=default.chunk, help="tokens of a prompt in a step (%(default)s)")
    p.add_argument("--budget", type=int, default=default.budget, help="tokens a step (%(default)s)")
    p.add_argument("--seed", type=int, default=default.seed, help="of arrivals and lengths (%(default)s)")
    p.add_argument(
        "--steps-per-second",
        type=float,
        default=default.steps_per_second,
        metavar="S",
        help="on a terminal; elsewhere time is not waited for (%(default)s)",
    )
    return p


def animate(world: World, console: Console) -> None:
    """Draw the steps in real time, several to a frame if they are too fast for the eye."""
    rate = world.show.steps_per_second
    steps_per_frame = max(1, round(rate / FRAMES_PER_SECOND))
    due = time.monotonic()
    with Live(console=console, auto_refresh=False, transient=True) as screen:
        while world.going:
            for _ in range(steps_per_frame):
                world.step()
            screen.update(view.picture(world, console.width, console.height - 1), refresh=True)
            due += steps_per_frame / rate
            time.sleep(max(due - time.monotonic(), 0))


def snapshots(world: World, console: Console) -> None:
    """Print a few steps as plain text: whenever another quarter of the requests has been served."""
    total = world.show.requests
    due = sorted({total * part // (SNAPSHOTS + 1) for part in range(1, SNAPSHOTS + 1)})
    while world.going:
        world.step()
        if due and world.simulation.stats.ended >= due[0]:
            del due[0]
            console.print(view.picture(world, console.width), "", sep="\n")


def main(arguments: list[str] | None = None) -> int:
    p = parser()
    try:
        world = World(Show(**vars(p.parse_args(arguments))))
    except ValueError as error:
        p.error(str(error))
    console = Console()
    if console.options.ascii_only:
        p.error(f"strips are drawn with characters that {console.encoding} lacks: set PYTHONIOENCODING=utf-8")
    try:
        (animate if console.is_terminal else snapshots)(world, console)
    except KeyboardInterrupt:
        console.print(f"Stopped at step {world.steps}.", highlight=False)
        return 130
    console.print(view.summary(world))
    return 0

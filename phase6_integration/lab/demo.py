"""`python -m phase6_integration`: all seven phases as one engine, step by step, on the bundled model."""

import argparse
from typing import TYPE_CHECKING

from rich.console import Console
from rich.live import Live

if TYPE_CHECKING:
    from phase6_integration.lab.world import World

SNAPSHOTS = 3
# Option, kind, help. Their defaults are those of demo.Show, which loads torch and is asked only once they are read.
OPTIONS = (
    ("-n", "--requests", int, "that come, all at once (16)"),
    ("", "--max-tokens", int, "of an answer (48)"),
    ("", "--temperature", float, "0: always the likeliest token (0.0)"),
    ("", "--max-running", int, "requests at a time (6)"),
    ("", "--budget", int, "tokens of a step (64)"),
    ("", "--chunk", int, "tokens of one prompt in a step (48)"),
    ("", "--pages", int, "in the memory (64)"),
    ("", "--page-size", int, "tokens in a page (16)"),
    ("", "--seed", int, "of questions and answers (0)"),
)


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="python -m phase6_integration", description=__doc__, argument_default=argparse.SUPPRESS
    )
    for short, name, kind, words in OPTIONS:
        p.add_argument(*filter(None, (short, name)), type=kind, metavar="N", help=words)
    return p


def animate(world: "World", console: Console) -> None:
    """Draw each step as it has been done."""
    from phase6_integration.lab import view

    with Live(console=console, auto_refresh=False, transient=True) as screen:
        while world.going:
            world.step()
            screen.update(view.picture(world, console.width, console.height - 1), refresh=True)


def snapshots(world: "World", console: Console) -> None:
    """A few moments as plain text: each time another quarter of the requests has been answered."""
    from phase6_integration.lab import view

    everyone = len(world.clients)
    due = sorted({everyone * part // (SNAPSHOTS + 1) for part in range(1, SNAPSHOTS + 1)} - {0})
    while world.going:
        world.step()
        if due and world.done >= due[0]:
            due = [count for count in due if count > world.done]
            console.print(view.picture(world, console.width), "", sep="\n")


def main(arguments: list[str] | None = None) -> int:
    p = parser()
    given = vars(p.parse_args(arguments))
    console, world = Console(), None
    try:
        with console.status("loading the bundled model"):
            from phase6_integration.lab import view
            from phase6_integration.lab.world import Show, World

            try:
                show = Show(**given)
                engine = show.engine()
            except ValueError as error:
                p.error(str(error))
        with engine:
            world = World.of(show, engine)
            (animate if console.is_terminal else snapshots)(world, console)
            console.print(view.answers(world), "", view.stats(engine.get_stats()), sep="\n")
    except KeyboardInterrupt:
        console.print(f"Stopped at step {world.steps if world else 0}.", highlight=False)
        return 130
    return 0

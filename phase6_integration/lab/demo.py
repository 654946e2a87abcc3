"""`python -m phase6_integration`: all seven phases as one engine, step by step, on the bundled model."""

from typing import TYPE_CHECKING

from rich.console import Console
from rich.live import Live

from phase6_integration.engine.flags import Parser, add_fields
from phase6_integration.lab.show import Show

if TYPE_CHECKING:
    from phase6_integration.lab.world import World

SNAPSHOTS = 3


def animate(world: "World", console: Console) -> None:
    """Redraw the screen after each step."""
    from phase6_integration.lab import view

    with Live(console=console, auto_refresh=False, transient=True) as screen:
        while world.engine.has_work:
            world.step()
            screen.update(view.picture(world, console.width, console.height - 1), refresh=True)


def snapshots(world: "World", console: Console) -> None:
    """Print the picture each time another quarter of the requests has finished."""
    from phase6_integration.lab import view

    total = len(world.clients)
    due = sorted({total * part // (SNAPSHOTS + 1) for part in range(1, SNAPSHOTS + 1)} - {0})
    while world.engine.has_work:
        world.step()
        if due and world.finished >= due[0]:
            due = [count for count in due if count > world.finished]
            console.print(view.picture(world, console.width), "", sep="\n")


def main(arguments: list[str] | None = None) -> int:
    parser = Parser(prog="python -m phase6_integration", description=__doc__)
    add_fields(parser, Show)
    console, world = Console(), None
    try:
        show = Show(**vars(parser.parse_args(arguments)))
        with console.status("loading the bundled model"):
            from phase6_integration.lab import view
            from phase6_integration.lab.world import World, open_engine

            engine = open_engine(show)
    except ValueError as error:
        parser.error(str(error))
    except KeyboardInterrupt:
        console.print("Stopped.")
        return 130
    try:
        with engine:
            world = World.of(show, engine)
            (animate if console.is_terminal else snapshots)(world, console)
            console.print(view.answers(world), "", view.figures(world), sep="\n")
    except KeyboardInterrupt:
        console.print(f"Stopped at step {world.steps if world else 0}.", highlight=False)
        return 130
    return 0

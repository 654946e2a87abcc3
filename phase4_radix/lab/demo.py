"""`python -m phase4_radix`: watch the tree of prefixes grow, split and lose leaves; with --type, by your prompts."""

import argparse
import time

from rich.console import Console
from rich.live import Live

from phase4_radix.lab import view
from phase4_radix.lab.draw import counted
from phase4_radix.lab.world import Setting, World, play

HOW = (
    "Type a prompt and press Enter; it is computed, answered, and keeps its pages in use. @name before it is its salt. "
    "Enter alone lets the oldest finish. End with Ctrl-D."
)


def parser() -> argparse.ArgumentParser:
    """The command line, with its defaults from Setting."""
    default = Setting()
    p = argparse.ArgumentParser(prog="python -m phase4_radix", description=__doc__)
    p.add_argument("--type", action="store_true", help="read prompts, a line each, and play no scenes")
    p.add_argument("--pages", type=int, default=default.pages, help="in the memory (%(default)s)")
    p.add_argument("--page-size", type=int, default=default.page_size, help="tokens in a page (%(default)s)")
    p.add_argument(
        "--steps-per-second",
        type=float,
        default=default.steps_per_second,
        metavar="S",
        help="on a terminal; elsewhere time is not waited for (%(default)s)",
    )
    return p


def animate(world: World, console: Console, rate: float) -> None:
    """Every step as it comes, with a pause at the end of a scene."""
    due, last = time.monotonic(), None
    with Live(console=console, auto_refresh=False, transient=True) as screen:
        for scene in play(world):
            due += (1 if scene is last or last is None else 12) / rate
            last = scene
            screen.update(view.picture(world, scene.caption), refresh=True)
            time.sleep(max(due - time.monotonic(), 0))


def snapshots(world: World, console: Console) -> None:
    """A picture a scene: when the first of it is done."""
    shown = None
    for scene in play(world):
        if scene is not shown and any(not talk.answer for talk in world.running):
            shown = scene
            console.print(view.picture(world, scene.caption), "", sep="\n")


def typed(world: World, console: Console) -> None:
    """A picture a line: the line's request stays, and holds what it uses, until it is let go."""
    console.print(HOW, style="dim")
    for line in iter(lambda: _line(console), None):
        world.mark()
        caption = "The oldest has finished." if world.running else "Nobody is there."
        if line:
            salt, _, prompt = line[1:].partition(" ") if line.startswith("@") else ("", "", line)
            try:
                request = world.say(prompt, salt=salt)
            except ValueError as error:
                console.print(str(error), style="red", highlight=False)
                continue
            caption = (
                f"{request.id} has {counted(request.total, 'token')}, "
                f"{world.cache.cached_tokens(request)} of them there already."
            )
        elif world.running:
            world.finish(world.running[0])
        while world.step():
            pass
        if world.waiting:
            caption += " It waits for room: Enter alone lets the oldest finish."
        console.print(view.picture(world, caption), "", sep="\n")


def _line(console: Console) -> str | None:
    """The next line, None at the end of them."""
    try:
        return console.input("> " if console.is_terminal else "").strip()
    except EOFError:
        return None


def main(arguments: list[str] | None = None) -> int:
    p = parser()
    options = vars(p.parse_args(arguments))
    by_hand = options.pop("type")
    try:
        setting = Setting(**options)
    except ValueError as error:
        p.error(str(error))
    world, console = World(setting), Console()
    try:
        if by_hand:
            typed(world, console)
        elif console.is_terminal:
            animate(world, console, setting.steps_per_second)
        else:
            snapshots(world, console)
    except KeyboardInterrupt:
        console.print(f"Stopped at step {world.steps}.", highlight=False)
        return 130
    console.print(view.summary(world))
    return 0

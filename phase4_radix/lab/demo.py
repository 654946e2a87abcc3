"""`python -m phase4_radix`: watch a radix tree grow, split and evict its leaves. `--type` reads your own prompts."""

import argparse
import time

from rich.console import Console
from rich.live import Live

from phase0_request.lab import palette
from phase4_radix.lab import view
from phase4_radix.lab.draw import counted
from phase4_radix.lab.world import Setting, World, play

HOW = (
    "Type a prompt and press Enter: it is computed and answered, and keeps its pages. @name before it is its salt. "
    "Enter alone finishes the oldest request. Ctrl-D ends."
)


def parser() -> argparse.ArgumentParser:
    """The command line, with its defaults from Setting."""
    default = Setting()
    p = argparse.ArgumentParser(prog="python -m phase4_radix", description=__doc__)
    p.add_argument("--type", action="store_true", help="read prompts, one per line, instead of playing the scenes")
    p.add_argument("--pages", type=int, default=default.pages, help="in the cache (%(default)s)")
    p.add_argument("--page-size", type=int, default=default.page_size, help="tokens per page (%(default)s)")
    p.add_argument(
        "--steps-per-second",
        type=float,
        default=default.steps_per_second,
        metavar="S",
        help="on a terminal; piped, the demo does not wait (%(default)s)",
    )
    return p


def animate(world: World, console: Console, rate: float) -> None:
    """Show every step, with a pause after each scene."""
    due, last = time.monotonic(), None
    with Live(console=console, auto_refresh=False, transient=True) as screen:
        for scene in play(world):
            due += (1 if scene is last or last is None else 12) / rate
            last = scene
            screen.update(view.picture(world, scene.caption), refresh=True)
            time.sleep(max(due - time.monotonic(), 0))


def snapshots(world: World, console: Console) -> None:
    """Print one picture per scene, when its first request is complete."""
    shown = None
    for scene in play(world):
        if scene is not shown and any(not each.answer for each in world.running):
            shown = scene
            console.print(view.picture(world, scene.caption), "", sep="\n")


def typed(world: World, console: Console) -> None:
    """Print one picture per line typed. Its request keeps running, and its pages locked, until it is finished."""
    console.print(HOW, style="dim")
    for line in iter(lambda: _line(console), None):
        world.mark()
        caption = "The oldest request has finished." if world.running else "No request is running."
        if line:
            salt, _, prompt = line[1:].partition(" ") if line.startswith("@") else ("", "", line)
            try:
                request = world.say(prompt, salt=salt)
            except ValueError as error:
                console.print(str(error), style=palette.FAULT, highlight=False)
                continue
            caption = (
                f"{request.id} has {counted(request.total, 'token')}, "
                f"{world.cache.cached_tokens(request)} of them cached."
            )
        elif world.running:
            world.finish(world.running[0])
        while world.step():
            pass
        if world.waiting:
            caption += " It waits for free pages: Enter alone finishes the oldest request."
        console.print(view.picture(world, caption), "", sep="\n")


def _line(console: Console) -> str | None:
    """The next line, or None at the end of the input."""
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

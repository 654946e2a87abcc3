"""`python -m phase5_continuous.lab explore`: every state of a small engine, each checked; a bug is its shortest story.

Each letter of a prompt is a token. The first prompt is answered A, B, C ..., the second I, J, K ..., the third
Q, R, S ...: a prompt such as aabAB goes on from the first one's answer. Without prompts, a named world is explored.

    python -m phase5_continuous.lab explore aab aac zzz --pages 4
    python -m phase5_continuous.lab explore --bug 4b --film 4b.jsonl
"""

import argparse
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from rich.console import Console

from phase0_request.lab.report import add_fields, at_least_one, finish, parser, section
from phase5_continuous.extras.record.record_file import encoded, open_record, read
from phase5_continuous.lab.exploring.planting import bug
from phase5_continuous.lab.exploring.search import Found, explore
from phase5_continuous.lab.exploring.setting import ALSO, Setting, kinds
from phase5_continuous.lab.exploring.story import tell
from phase5_continuous.lab.exploring.worlds import BUGS, WORLDS
from phase5_continuous.policies import POLICIES

NUMBERS = {
    "pages": "of the pool",
    "page_size": "tokens of a page",
    "budget": "tokens of a step",
    "chunk": "tokens of a slice",
    "places": "requests that may run at once",
    "watermark": "share of the pool that stays free when a request is admitted",
    "ahead": "steps that may be in flight beside the oldest",
    "drafts": "tokens of a draft",
}


def main(arguments: list[str] | None = None) -> int:
    p = parser("phase5_continuous.lab explore", __doc__)
    p.add_argument("prompts", nargs="*", metavar="PROMPT", help="of the requests that may come")
    p.add_argument("--world", choices=WORLDS, default="small", help="without prompts (%(default)s)")
    p.add_argument("--bug", choices=BUGS, metavar="ID", help="plant a bug of the scheduler; it has a world of its own")
    p.add_argument("--all", action="store_true", help="explore every named world, and find every planted bug")
    of = p.add_argument_group("the world of the prompts")
    for name in ("tenants", "salts"):
        of.add_argument(f"--{name}", nargs="+", default=[], metavar="NAME", help="one for each prompt")
    of.add_argument("--priorities", nargs="+", type=int, default=[], metavar="N", help="one for each prompt")
    of.add_argument("--tokens", type=at_least_one, default=2, help="the most that each request gets (%(default)s)")
    add_fields(of, Setting(kinds=()), NUMBERS)
    of.add_argument("--policy", choices=POLICIES, default="fcfs", help="(%(default)s)")
    of.add_argument("--fair", action="store_true", help="tenants take turns")
    of.add_argument("--limit", type=at_least_one, metavar="N", help="requests that may wait (any number)")
    also = "; ".join(f"{name}: {what}" for name, what in ALSO.items())
    of.add_argument("--also", nargs="*", choices=ALSO, default=[], help=f"what may happen besides ({also})")
    of.add_argument("--alone", action="store_true", help="requests share no pages: there is no prefix cache")
    of.add_argument("--ends", nargs="*", choices=("abort", "stop", "timeout"), default=["abort"], help="(abort)")
    of.add_argument(
        "--lost", type=int, metavar="N", help="steps that may be lost (any number; 0 if tenants take turns)"
    )
    p.add_argument("--processes", type=at_least_one, default=2, help="(%(default)s)")
    p.add_argument("--most", type=at_least_one, metavar="STATES", help="stop when as many are known")
    p.add_argument("--again", action="store_true", help="then run the shortest way to each state again in one piece")
    p.add_argument("--film", type=Path, metavar="FILE", help="record the story, for `nanoserve replay FILE`")
    options = p.parse_args(arguments)
    options.again |= options.bug is not None
    console = Console(highlight=False)
    if options.all:
        figures = study(console, options.processes)
        finish(p, options, arguments, figures, console=console)
        return 0
    try:
        setting = chosen(options)
        with bug(options.bug) if options.bug else nullcontext():
            found = explore(setting, None, options.processes, options.most or sys.maxsize, options.again)
            show(console, setting, found, options.film)
    except ValueError as error:
        p.error(str(error))
    finish(p, options, arguments, {"world": row(found)}, console=console)
    return int(found.broken is not None and options.bug is None)


def chosen(options: argparse.Namespace) -> Setting:
    """The world that the command line describes."""
    if not options.prompts:
        return BUGS[options.bug] if options.bug else WORLDS[options.world]
    lost = 0 if options.fair and options.lost is None else options.lost
    return Setting(
        kinds=kinds(options.prompts, options.tokens, options.tenants, options.priorities, options.salts),
        **{name: getattr(options, name) for name in NUMBERS},
        policy=options.policy,
        fair=options.fair,
        limit=options.limit,
        also=tuple(options.also),
        shares=not options.alone,
        ends=tuple(options.ends),
        lost=lost,
    )


def show(console: Console, setting: Setting, found: Found, film: Path | None) -> None:
    """Print what a search has found: that all promises hold, or the shortest story in which one does not."""
    section(console, "Every state" if found.whole else "The first states", {"": row(found)})
    if found.broken is None:
        held = f"All promises hold. With nothing new arriving, all requests end within {found.longest} steps"
        console.print(f"{held} (promised: {setting.bound})." if found.whole else "No promise is broken in these.")
        return
    console.print(f"Broken: [bold]{found.broken.promise}[/bold]")
    console.print(f"The shortest story has {len(found.story)} events:")
    *told, last = [*tell(setting, found.story, film), found.broken.how][: len(found.story) + 1]
    for number, sentence in enumerate(told, 1):
        console.print(f"  {number:2}  {sentence}", soft_wrap=True)
    console.print(f"      {last}", soft_wrap=True)
    if film is not None:
        *lines, end = read(film)
        with open_record(film) as record:
            for line in [*lines, {**end, "broken": last}]:
                record.write(encoded(line))
        console.print(f"\n`nanoserve replay {film}` shows it.")


def row(found: Found) -> dict[str, Any]:
    return {
        "states": found.states,
        "edges": found.edges,
        "deepest": found.depth,
        "longest_way": found.longest if found.longest is not None else "-",
        "seconds": round(found.seconds, 2),
        "states_per_second": round(found.states / found.seconds),
        "bytes_per_state": round(found.bytes / found.states),
        "peak_megabytes": round(found.peak_megabytes),
    }


def study(console: Console, processes: int) -> dict[str, Any]:
    """Explore every named world, and find every planted bug in its own."""
    worlds = {}
    for name, setting in WORLDS.items():
        found = explore(setting, processes=processes)
        assert found.broken is None, found.broken
        assert found.whole
        worlds[name] = {**row(found), "promised": setting.bound}
    section(console, "All promises hold in every state of these worlds", worlds)
    planted: dict[str, dict[str, Any]] = {}
    for name, setting in BUGS.items():
        with bug(name):
            found = explore(setting, processes=1, again=True)
        assert found.broken is not None, f"bug {name} breaks no promise"
        planted[name] = {
            "states": found.states,
            "events": len(found.story),
            "seconds": round(found.seconds, 2),
            "broken": found.broken.promise,
        }
    section(console, "Planted bugs", planted)
    return {"worlds": worlds, "bugs": planted}

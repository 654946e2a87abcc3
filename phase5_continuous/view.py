"""The demo drawn: a strip a request, a column a step, and under them the pages and tokens of each step."""

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from phase5_continuous.demo import DECODE, LEFT_OUT, PREEMPTED, PREFILL, SIGNS, WAITING, Strip, World

STYLES = {WAITING: "dim", PREFILL: "cyan", DECODE: "green", PREEMPTED: "bold red", LEFT_OUT: "yellow"}
LEVELS = " \u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588"
NAME = 7  # columns before a strip
BESIDE = 6  # lines that are no strips


def picture(world: World, width: int, height: int | None = None) -> RenderableType:
    """The last steps, as many as fit. Of too many requests, the last to have come are left out."""
    across = max(width - NAME, 8)
    start = max(world.steps - across, 0)
    strips = [strip for strip in world.strips.values() if strip.first + len(strip.signs) > start]
    left_out = 0
    if height is not None:
        room = max(height - BESIDE, 1)
        left_out = max(len(strips) - room, 0)
        strips = strips[: room - 1] if left_out else strips
    rows = [_strip(strip, start, world.steps) for strip in strips]
    if left_out:
        rows.append(Text(f"{left_out + 1} more", "dim"))
    return Group(_head(world), _key(), *rows, *_over_time(world, across), _now(world))


def summary(world: World) -> RenderableType:
    """All of it, in numbers."""
    o = world.simulation.outcome()
    table = Table(header_style="dim", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    figures = {
        "requests": f"{o.requests}",
        "steps": f"{o.steps:,}",
        "seconds": f"{o.seconds:.1f}",
        "tokens/s": f"{o.tokens_per_second:,.0f}",
        "TTFT p50": f"{o.ttft_p50 * 1e3:,.0f} ms",
        "p99": f"{o.ttft_p99 * 1e3:,.0f} ms",
        "preempted": f"{o.preemptions}",
    }
    for name in figures:
        table.add_column(name, justify="right")
    table.add_row(*figures.values())
    return table


def _head(world: World) -> Text:
    scheduler = world.scheduler
    waiting, preempted = len(scheduler.admission.waiting), len(scheduler.residents.preempted)
    counts = f"{len(scheduler.residents.running)} running  {waiting} waiting  {preempted} preempted"
    done = f"{world.simulation.tally.ended} of {world.show.requests} done"
    return Text(f"step {world.steps}   {world.simulation.clock.now:.2f} s   {counts}  {done}", "bold", no_wrap=True)


def _key() -> Text:
    return Text("  ", no_wrap=True).join(
        Text.assemble((sign, STYLES[sign]), f" {name}") for sign, name in SIGNS.items()
    )


def _strip(strip: Strip, start: int, stop: int) -> Text:
    text = Text(f"{strip.name:<{NAME}}", no_wrap=True)
    for sign in strip.window(start, stop).rstrip():
        text.append(sign, STYLES.get(sign, ""))
    return text


def _over_time(world: World, across: int) -> Sequence[Text]:
    """Two lines of bars: the pages in use, and the tokens computed, each against what there is."""
    usage, budget = world.scheduler.cache.usage, world.scheduler.chunker.budget.max_batched_tokens
    return [
        Text(f"{name:<{NAME}}" + "".join(_bar(value, most) for value in list(values)[-across:]), style, no_wrap=True)
        for name, values, most, style in (
            ("pages", world.pages, usage.total, "magenta"),
            ("tokens", world.tokens, budget, "blue"),
        )
    ]


def _bar(value: int, most: int) -> str:
    return LEVELS[-(-value * (len(LEVELS) - 1) // most)]


def _now(world: World) -> Text:
    usage, step = world.scheduler.cache.usage, world.last
    computed = f"{step.prefill_tokens} prefill + {step.decode_tokens} decode tokens" if step else "no step yet"
    pages = f"{usage.referenced} pages in use, {usage.cached} kept, {usage.free} free"
    return Text(f"{computed}   {pages}   {world.throughput():,.0f} tokens/s", no_wrap=True)

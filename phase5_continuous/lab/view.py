"""Draws the demo: a strip for each request, a column for each step, and below the pages and tokens of each step."""

from collections.abc import Callable, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from phase0_request.lab import palette
from phase0_request.request import RequestState
from phase5_continuous.lab.world import DECODE, LEFT_OUT, PREEMPTED, PREFILL, SIGNS, WAITING, Strip, World

STYLES = {
    WAITING: palette.WAITING,
    PREFILL: palette.PREFILL,
    DECODE: palette.DECODE,
    PREEMPTED: palette.PREEMPTED,
    LEFT_OUT: palette.LEFT_OUT,
}
LEVELS = " \u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588"
NAME = 7  # columns before a strip
BESIDE = 6  # lines besides the strips


def picture(world: World, width: int, height: int | None = None) -> RenderableType:
    """Draw as many of the last steps as fit. Of too many requests, the most relevant ones, in the order of arrival."""
    across = max(width - NAME, 8)
    start = max(world.steps - across, 0)
    strips = [strip for strip in world.strips.values() if strip.first + len(strip.signs) > start]
    left_out = 0
    if height is not None:
        room = max(height - BESIDE, 1)
        left_out = max(len(strips) - room, 0)
        if left_out:
            drawn = {strip.name for strip in sorted(strips, key=_weight(world))[: room - 1]}
            strips = [strip for strip in strips if strip.name in drawn]
    rows = [_strip(strip, start, world.steps) for strip in strips]
    if left_out:
        rows.append(Text(f"{left_out + 1} more", "dim"))
    head, key, now = (_fitting(width, parts) for parts in (_head(world), _key(), _now(world)))
    return Group(head, key, *rows, *_over_time(world, across), now)


def _weight(world: World) -> Callable[[Strip], tuple[int, int]]:
    """Running requests are drawn first, then preempted, then waiting ones, then those that ended last."""
    states = {sequence.request.id: sequence.request.state for sequence in world.scheduler.sequences}
    order = (RequestState.RUNNING, RequestState.PREEMPTED, RequestState.WAITING)

    def weight(strip: Strip) -> tuple[int, int]:
        state = states.get(strip.name)
        return (order.index(state), strip.first) if state in order else (len(order), -strip.first - len(strip.signs))

    return weight


def summary(world: World) -> RenderableType:
    """The figures of the whole run."""
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
    figures |= {name: f"{count}" for name, count in (("refused", o.refused), ("failed", o.failed)) if count}
    for name in figures:
        table.add_column(name, justify="right")
    table.add_row(*figures.values())
    return table


def _fitting(width: int, parts: Sequence[Text]) -> Text:
    """Join as many parts as fit, from the first on. None is cut."""
    line = Text("  ", no_wrap=True)
    while parts and line.join(parts).cell_len > width:
        parts = parts[:-1]
    return line.join(parts)


def _head(world: World) -> Sequence[Text]:
    scheduler, stats = world.scheduler, world.simulation.stats
    return [
        Text(part, "bold")
        for part in (
            f"step {world.steps}",
            f"{world.simulation.clock.now:.2f} s",
            f"{len(scheduler.running_set.running)} running",
            f"{len(scheduler.admission.waiting)} waiting",
            f"{len(scheduler.running_set.preempted)} preempted",
            f"{stats.ended} of {world.show.requests} done",
        )
    ]


def _key() -> Sequence[Text]:
    return [Text.assemble((sign, STYLES[sign]), f" {name}") for sign, name in SIGNS.items()]


def _strip(strip: Strip, start: int, stop: int) -> Text:
    text = Text(f"{strip.name:<{NAME}}", no_wrap=True)
    for sign in strip.window(start, stop).rstrip():
        text.append(sign, STYLES.get(sign, ""))
    return text


def _over_time(world: World, across: int) -> Sequence[Text]:
    """Two lines of bars: pages in use of the pool, and tokens computed of the budget."""
    usage, budget = world.scheduler.cache.usage, world.scheduler.chunker.budget.max_batched_tokens
    return [
        Text.assemble(
            f"{name:<{NAME}}", ("".join(_bar(value, most) for value in list(values)[-across:]), style), no_wrap=True
        )
        for name, values, most, style in (
            ("pages", world.pages, usage.total, palette.IN_USE),
            ("tokens", world.tokens, budget, ""),
        )
    ]


def _bar(value: int, most: int) -> str:
    return LEVELS[-(-value * (len(LEVELS) - 1) // most)]


def _now(world: World) -> Sequence[Text]:
    usage, step = world.scheduler.cache.usage, world.last
    computed = f"{step.prefill_tokens} prefill + {step.decode_tokens} decode tokens" if step else "no step yet"
    pages = f"{usage.referenced} pages in use, {usage.cached} cached, {usage.free} free"
    return [Text(part) for part in (f"{world.throughput():,.0f} tokens/s", computed, pages)]

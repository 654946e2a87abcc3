"""Draw the demo: requests and their states, the last steps, the pages; at the end the answers and the figures."""

from collections.abc import Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from phase0_request.lab import palette
from phase6_integration.lab.world import Client, World

STYLES = {
    "waiting": palette.WAITING,
    "prefill": palette.PREFILL,
    "decode": palette.DECODE,
    "stop": palette.ENDED,
    "length": palette.ENDED,
}
OTHER_LINES = 7  # neither requests nor steps
STEPS = 8  # rows of the table of steps, at most


def picture(world: World, width: int, height: int | None = None) -> RenderableType:
    """The current state. If the terminal is too low for all requests, running ones are shown first."""
    steps = list(world.rows)[-STEPS:]
    room = len(world.clients) if height is None else height - OTHER_LINES - STEPS
    if room < 3 and height is not None:  # a low terminal: half of it for requests, half for steps
        steps = steps[-max((height - OTHER_LINES) // 2, 1) :]
        room = max(height - OTHER_LINES - len(steps), 1)
    return Group(_head(world), _pages(world, width), Text(), _requests(world, room, width), Text(), _steps(steps))


def answers(world: World) -> RenderableType:
    """All questions and answers, with the prompt tokens that were cached."""
    table = _table("#", "cached", "out", "end", right=("#", "cached", "out"))
    table.add_column("question and answer", overflow="fold")
    for number, client in enumerate(world.clients, 1):
        request = client.request
        cached = f"{client.cached} of {len(request.prompt_tokens)}"
        text = Text.assemble((client.question, "dim"), "\n", client.answer.strip())
        table.add_row(str(number), cached, str(len(request.output_tokens)), client.state, text)
    return table


def figures(world: World) -> RenderableType:
    """The run in figures. Times are wall-clock times, drawing included."""
    stats = world.engine.get_stats()
    computed = stats["prefill_tokens"] + stats["decode_tokens"]
    rows = {
        "duration": f"{world.seconds:.2f} s, {world.steps} steps",
        "generated": f"{world.tokens:,} tokens, {world.throughput:,.0f} tokens/s",
        "computed": f"{computed:,} tokens, {stats['avg_tokens_per_step']:.1f} tokens per step",
        "cache hit rate": f"{stats['cache_hit_rate']:.1%} of the prompt tokens",
        "preemptions": f"{stats['preemptions']}",
        "pages": "   ".join(f"{name} {count}" for name, count in stats["pages"].items()),
        "finished": "   ".join(f"{reason} {count}" for reason, count in stats["finished"].items()),
    }
    for key, name in (("queue_ms", "queue time"), ("ttft_ms", "TTFT"), ("itl_ms", "ITL"), ("e2e_ms", "end to end")):
        rows[name] = "   ".join(f"{quantile} {ms:.1f} ms" for quantile, ms in stats[key].items())
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False)
    table.add_column(style="dim", no_wrap=True)
    table.add_column()
    for name, text in rows.items():
        table.add_row(name, text)
    return table


def _head(world: World) -> Text:
    now = world.rows[-1].after if world.rows else None
    counts = f"{now.running} running  {now.waiting} waiting" if now else f"{len(world.clients)} waiting"
    hits = f"   hit rate {now.hit_rate:.0%}" if now and now.query_tokens else ""
    rate = f"   {world.throughput:,.0f} tokens/s"
    finished = f"{world.finished} of {len(world.clients)} finished"
    return Text(f"step {world.steps}   {counts}   {finished}{hits}{rate}", "bold", no_wrap=True, overflow="ellipsis")


def _pages(world: World, width: int) -> Text:
    """A bar of used, cached and free pages."""
    if not world.rows:
        return Text("pages")
    now = world.rows[-1].after
    label = f"  {now.pages_used} used, {now.pages_cached} cached, {now.pages_free} free"
    across = max(width - len(label) - 6, 8)
    used = -(-now.pages_used * across // now.pages_total)
    cached = now.pages_cached * across // now.pages_total
    cached = min(cached, across - used)
    bar = [("\u2588" * used, palette.IN_USE), ("\u2592" * cached, palette.CACHED)]
    free = ("\u00b7" * (across - used - cached), palette.FREE)
    return Text.assemble("pages ", *bar, free, label, no_wrap=True, overflow="ellipsis")


def _requests(world: World, room: int, width: int) -> Table:
    """A row for each request, with the end of its answer."""
    table = _table("#", "state", "prompt", "cached", "out", right=("#", "prompt", "cached", "out"))
    across = max(width - 42, 8)
    table.add_column("answer", no_wrap=True, width=across)
    for number, client in _in_view(list(enumerate(world.clients, 1)), room):
        request, cached = client.request, "" if client.cached is None else str(client.cached)
        table.add_row(
            str(number),
            Text(client.state, STYLES.get(client.state, palette.FAULT)),
            str(len(request.prompt_tokens)),
            cached,
            str(len(request.output_tokens)),
            _newest(client, across),
        )
    return table


def _newest(client: Client, across: int) -> Text:
    """The question, then the end of the growing answer, then the beginning of the finished one."""
    answer = " ".join(client.answer.split())
    if not answer:
        return Text(client.question, "dim", overflow="ellipsis")
    return Text(answer, overflow="ellipsis") if client.request.finished else Text(answer[-across:])


def _in_view(clients: Sequence[tuple[int, Client]], room: int) -> Sequence[tuple[int, Client]]:
    """As many as fit: running requests first, then waiting ones, then the last that finished."""
    order = {"prefill": 0, "decode": 0, "waiting": 1}
    chosen = sorted(clients, key=lambda one: (order.get(one[1].state, 2), one[0] if one[1].state in order else -one[0]))
    return sorted(chosen[:room], key=lambda one: one[0])


def _steps(rows: Sequence[Any]) -> Table:
    names = ("step", "prefill", "decode", "requests", "running", "waiting", "used", "cached", "free", "ms")
    table = _table(*names, right=names)
    for row in rows:
        now = row.after
        figures = (row.number, row.prefill_tokens, row.decode_tokens, row.requests, now.running, now.waiting)
        pages = (now.pages_used, now.pages_cached, now.pages_free)
        table.add_row(*map(str, (*figures, *pages)), f"{row.milliseconds:.1f}")
    return table


def _table(*names: str, right: Sequence[str] = ()) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for name in names:
        table.add_column(name, justify="right" if name in right else "left", no_wrap=True)
    return table

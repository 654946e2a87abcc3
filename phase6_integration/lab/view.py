"""The demo drawn: who asks and how far they are, the last steps, the pages; and after the end, answers and figures."""

from collections.abc import Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from phase6_integration.lab.world import Client, World

STYLES = {"waiting": "yellow", "prefill": "cyan", "decode": "green", "stop": "dim", "length": "blue"}
BESIDE = 7  # lines that are neither requests nor steps
STEPS = 8  # rows of the table of steps, at most


def picture(world: World, width: int, height: int | None = None) -> RenderableType:
    """The moment. Of too many requests those are shown that are under way, and as many more as fit."""
    steps = list(world.rows)[-STEPS:]
    room = len(world.clients) if height is None else height - BESIDE - STEPS
    if room < 3 and height is not None:  # a low terminal: half of it for each
        steps = steps[-max((height - BESIDE) // 2, 1) :]
        room = max(height - BESIDE - len(steps), 1)
    return Group(_head(world), _pages(world, width), Text(), _requests(world, room, width), Text(), _steps(steps))


def answers(world: World) -> RenderableType:
    """What everyone was told, with what was found in the cache of each prompt."""
    table = _table("#", "cached", "out", "end", right=("#", "cached", "out"))
    table.add_column("question and answer", overflow="fold")
    for number, client in enumerate(world.clients, 1):
        request = client.request
        cached = f"{client.cached} of {len(request.prompt_tokens)}"
        said = Text.assemble((client.question, "dim"), "\n", client.answer.strip())
        table.add_row(str(number), cached, str(len(request.output_tokens)), client.state, said)
    return table


def stats(figures: dict[str, Any]) -> RenderableType:
    """get_stats(), with its groups on lines of their own."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False)
    table.add_column(style="dim", no_wrap=True)
    table.add_column()
    for name, value in figures.items():
        if isinstance(value, dict):
            shown = "   ".join(f"{inner} {_number(one)}" for inner, one in value.items())
        else:
            shown = f"{value:.1%}" if name.endswith("rate") else _number(value)
        table.add_row(name, shown)
    return table


def _head(world: World) -> Text:
    now = world.rows[-1].after if world.rows else None
    counts = f"{now.running} running  {now.waiting} waiting" if now else f"{len(world.clients)} waiting"
    hits = f"   hit rate {now.hit_rate:.0%}" if now and now.query_tokens else ""
    rate = f"   {world.engine.get_stats()['throughput']:,.0f} tokens/s"
    done = f"{world.done} of {len(world.clients)} done"
    return Text(f"step {world.steps}   {counts}   {done}{hits}{rate}", "bold", no_wrap=True, overflow="ellipsis")


def _pages(world: World, width: int) -> Text:
    """A bar: pages in use, kept for whoever comes, free."""
    if not world.rows:
        return Text("pages")
    now = world.rows[-1].after
    words = f"  {now.pages_used} used, {now.pages_cached} kept, {now.pages_free} free"
    across = max(width - len(words) - 6, 8)
    used = -(-now.pages_used * across // now.pages_total)
    kept = now.pages_cached * across // now.pages_total
    kept = min(kept, across - used)
    bar = [("\u2588" * used, "magenta"), ("\u2592" * kept, "magenta"), ("\u00b7" * (across - used - kept), "dim")]
    return Text.assemble("pages ", *bar, words, no_wrap=True, overflow="ellipsis")


def _requests(world: World, room: int, width: int) -> Table:
    """A row for each, the newest of its answer at the right."""
    table = _table("#", "state", "prompt", "cached", "out", right=("#", "prompt", "cached", "out"))
    across = max(width - 42, 8)
    table.add_column("answer", no_wrap=True, width=across)
    for number, client in _in_view(list(enumerate(world.clients, 1)), room):
        request, cached = client.request, "" if client.cached is None else str(client.cached)
        table.add_row(
            str(number),
            Text(client.state, STYLES.get(client.state, "red")),
            str(len(request.prompt_tokens)),
            cached,
            str(len(request.output_tokens)),
            _newest(client, across),
        )
    return table


def _newest(client: Client, across: int) -> Text:
    """The question until there is an answer; of an answer under way the end, of one that is there the beginning."""
    answer = " ".join(client.answer.split())
    if not answer:
        return Text(client.question, "dim", overflow="ellipsis")
    return Text(answer, overflow="ellipsis") if client.request.finished else Text(answer[-across:])


def _in_view(clients: Sequence[tuple[int, Client]], room: int) -> Sequence[tuple[int, Client]]:
    """As many as there is room for: those under way first, then those to come, then the last to have ended."""
    order = {"prefill": 0, "decode": 0, "waiting": 1}
    chosen = sorted(clients, key=lambda one: (order.get(one[1].state, 2), one[0] if one[1].state in order else -one[0]))
    return sorted(chosen[:room], key=lambda one: one[0])


def _steps(rows: Sequence[Any]) -> Table:
    names = ("step", "prefill", "decode", "requests", "running", "waiting", "used", "kept", "free", "ms")
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


def _number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:,.1f}"

"""The demo's terminal view: the tree, the pages, and the hit rate."""

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from phase0_request.lab import palette
from phase4_radix.lab.draw import counted, draw, where
from phase4_radix.lab.world import World
from phase4_radix.radix_tree import NodeView

MARKS = {
    "in use": ("\u2588", palette.IN_USE),
    "cached": ("\u2592", palette.CACHED),
    "free": ("\u00b7", palette.FREE),
}


def picture(world: World, caption: str) -> RenderableType:
    """One moment: the caption, the pages, the counters, the changes since the mark, the tree."""
    news, fresh = world.news, world.fresh
    return Group(
        Text(caption, "bold"),
        _pages(world),
        _counts(world),
        Text(", ".join(news) or "no change in the tree", "bold" if news else "dim"),
        draw(world.cache.tree, lambda node: _node(world, node, not fresh.isdisjoint(node.pages))),
    )


def summary(world: World) -> RenderableType:
    counts, usage = world.cache.counts, world.cache.usage
    table = Table(header_style="dim", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    figures = {
        "queries": counts.queries,
        "tokens": counts.query_tokens,
        "hits": counts.hit_tokens,
        "hit rate": f"{counts.hit_rate:.0%}",
        "duplicates": counts.duplicates,
        "evicted": counts.evictions,
        "cached": usage.cached,
    }
    for name in figures:
        table.add_column(name, justify="right")
    table.add_row(*map(str, figures.values()))
    return table


def _node(world: World, node: NodeView, new: bool) -> Text:
    text = world.tokenizer.decode(node.tokens).replace("\n", "\u21b5")
    return Text.assemble(
        (f"{where(node.pages)} ", "dim"),
        (f"{counted(node.ref_count, 'lock')} " if node.ref_count else "", palette.IN_USE),
        (f"[{node.salt}] " if node.salt else "", palette.SALT),
        (text, f"{'bold ' if new else ''}{palette.IN_USE if node.ref_count else 'default'}"),
        no_wrap=True,
        overflow="ellipsis",
    )


def _pages(world: World) -> Text:
    """One character per page."""
    cached = {page for node in world.cache.tree.nodes() if not node.ref_count for page in node.pages}
    strip = Text("pages ", no_wrap=False)
    for page in range(world.cache.allocator.num_pages):
        state = "cached" if page in cached else "in use" if world.cache.allocator.count(page) else "free"
        strip.append(*MARKS[state])
    return strip


def _counts(world: World) -> Text:
    usage, counts = world.cache.usage, world.cache.counts
    numbers = {"in use": usage.referenced, "cached": usage.cached, "free": usage.free}
    pieces = [(f"{MARKS[name][0]} {number} {name}  ", MARKS[name][1]) for name, number in numbers.items()]
    rate = f"hits {counts.hit_tokens}/{counts.query_tokens} ({counts.hit_rate:.0%})"
    return Text.assemble(*pieces, f"{len(world.running)} running  {len(world.waiting)} waiting  {rate}")

"""The demo drawn: the tree, the pages, and how much was found."""

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from phase4_radix.lab.draw import counted, draw, where
from phase4_radix.lab.world import World
from phase4_radix.radix_tree import Branch

MARKS = {"in use": ("\u2588", "yellow"), "kept": ("\u2592", "cyan"), "free": ("\u00b7", "dim")}


def picture(world: World, caption: str) -> RenderableType:
    """The moment: what is to be seen, the pages in order, the counts, what is new, the tree."""
    news, fresh = world.news, world.fresh
    return Group(
        Text(caption, "bold"),
        _pages(world),
        _counts(world),
        Text(", ".join(news) or "the tree stays as it is", "green" if news else "dim"),
        draw(world.cache.tree, lambda branch: _branch(world, branch, not fresh.isdisjoint(branch.pages))),
    )


def summary(world: World) -> RenderableType:
    counts, usage = world.cache.counts, world.cache.usage
    table = Table(header_style="dim", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    figures = {
        "queries": counts.queries,
        "their tokens": counts.query_tokens,
        "found": counts.hit_tokens,
        "hit rate": f"{counts.hit_rate:.0%}",
        "duplicates": counts.duplicates,
        "evicted": counts.evictions,
        "kept": usage.cached,
    }
    for name in figures:
        table.add_column(name, justify="right")
    table.add_row(*map(str, figures.values()))
    return table


def _branch(world: World, branch: Branch, new: bool) -> Text:
    text = world.tokenizer.decode(branch.tokens).replace("\n", "\u21b5")
    return Text.assemble(
        (f"{where(branch.pages)} ", "dim"),
        (f"{counted(branch.locks, 'lock')} " if branch.locks else "", "bold yellow"),
        (f"[{branch.salt}] " if branch.salt else "", "magenta"),
        (text, "green" if new else "yellow" if branch.locks else ""),
        no_wrap=True,
        overflow="ellipsis",
    )


def _pages(world: World) -> Text:
    """A character a page."""
    kept = {page for branch in world.cache.tree.branches() if not branch.locks for page in branch.pages}
    strip = Text("pages ", no_wrap=False)
    for page in range(world.cache.allocator.num_pages):
        state = "kept" if page in kept else "in use" if world.cache.allocator.count(page) else "free"
        strip.append(*MARKS[state])
    return strip


def _counts(world: World) -> Text:
    usage, counts = world.cache.usage, world.cache.counts
    numbers = {"in use": usage.referenced, "kept": usage.cached, "free": usage.free}
    pieces = [(f"{MARKS[name][0]} {number} {name}  ", MARKS[name][1]) for name, number in numbers.items()]
    rate = f"found {counts.hit_tokens}/{counts.query_tokens} ({counts.hit_rate:.0%})"
    return Text.assemble(*pieces, f"{len(world.running)} running  {len(world.waiting)} waiting  {rate}")

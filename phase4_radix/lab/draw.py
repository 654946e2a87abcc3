"""A radix tree drawn: what each node holds, where it lies, and who has locked it."""

from collections.abc import Callable, Sequence

from rich.text import Text
from rich.tree import Tree

from phase1_kv_pool.lab.page_map import contiguous_runs
from phase4_radix.radix_tree import Branch, RadixTree

Describe = Callable[[Branch], Text]


def plainly(branch: Branch) -> Text:
    """A node in one line: tokens, pages, locks."""
    return Text.assemble(
        (f"{branch.salt}: " if branch.salt else "", "cyan"),
        shortened([str(token) for token in branch.tokens]),
        (f"  {where(branch.pages)}", "dim"),
        (f"  {counted(branch.locks, 'lock')}" if branch.locks else "", "bold yellow"),
        no_wrap=True,
        overflow="ellipsis",
    )


def draw(tree: RadixTree, describe: Describe = plainly) -> Tree:
    """The tree for a terminal, a line a node."""
    head = f"{counted(tree.num_pages, 'page')} in {counted(len(tree), 'node')}, {tree.num_locked} locked"
    path = [Tree(Text(head, "bold"), guide_style="dim")]
    for branch in tree.branches():  # each before those below it
        del path[branch.depth :]
        path.append(path[-1].add(describe(branch)))
    return path[0]


def shortened(words: Sequence[str], most: int = 12) -> str:
    """The first and the last of many words."""
    if len(words) <= most:
        return " ".join(words)
    return " ".join([*words[: most // 2], "\u2026", *words[-(most // 2) :]])


def where(pages: Sequence[int]) -> str:
    """Page numbers, neighbours taken together."""
    pieces = [str(first) if n == 1 else f"{first}-{first + n - 1}" for first, n in contiguous_runs(pages)]
    return f"{'page' if len(pages) == 1 else 'pages'} {shortened(pieces, 6)}"


def counted(number: int, name: str) -> str:
    return f"{number} {name}{'' if number == 1 else 's'}"

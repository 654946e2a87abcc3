"""Draws a radix tree in the terminal: the tokens, pages and locks of each node."""

from collections.abc import Callable, Sequence

from rich.text import Text
from rich.tree import Tree

from phase0_request.lab import palette
from phase1_kv_pool.lab.serving import contiguous_runs
from phase4_radix.radix_tree import NodeView, RadixTree

Describe = Callable[[NodeView], Text]


def plainly(node: NodeView) -> Text:
    """One node as a line: tokens, pages, locks."""
    return Text.assemble(
        (f"{node.salt}: " if node.salt else "", palette.SALT),
        shortened([str(token) for token in node.tokens]),
        (f"  {where(node.pages)}", "dim"),
        (f"  {counted(node.ref_count, 'lock')}" if node.ref_count else "", palette.IN_USE),
        no_wrap=True,
        overflow="ellipsis",
    )


def draw(tree: RadixTree, describe: Describe = plainly) -> Tree:
    """The whole tree, one line per node."""
    head = f"{counted(tree.num_pages, 'page')} in {counted(len(tree), 'node')}, {tree.num_locked} locked"
    path = [Tree(Text(head, "bold"), guide_style="dim")]
    for node in tree.nodes():  # parents before children
        del path[node.depth :]
        path.append(path[-1].add(describe(node)))
    return path[0]


def shortened(words: Sequence[str], most: int = 12) -> str:
    """Join words; if there are too many, only the first and the last ones."""
    if len(words) <= most:
        return " ".join(words)
    return " ".join([*words[: most // 2], "\u2026", *words[-(most // 2) :]])


def where(pages: Sequence[int]) -> str:
    """Page numbers, with ranges for consecutive ones."""
    pieces = [str(first) if n == 1 else f"{first}-{first + n - 1}" for first, n in contiguous_runs(pages)]
    return f"{'page' if len(pages) == 1 else 'pages'} {shortened(pieces, 6)}"


def counted(number: int, name: str) -> str:
    return f"{number} {name}{'' if number == 1 else 's'}"

"""A radix tree drawn: what each node holds, where it lies, and who has locked it."""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from rich.text import Text
from rich.tree import Tree

from phase1_kv_pool.allocator import runs


class Branch(NamedTuple):
    """What is to be seen of a node."""

    node: int
    depth: int  # below the root; its children have 1
    salt: str  # children of the root may have one
    tokens: list[int]
    pages: list[int]
    locks: int
    used: int


Describe = Callable[[Branch], Text]


def drawing(branches: Iterable[Branch], describe: Describe, root: Text) -> Tree:
    """The tree for a terminal. The branches come as one reads: each before those below it."""
    path = [Tree(root, guide_style="dim")]
    for branch in branches:
        del path[branch.depth :]
        path.append(path[-1].add(describe(branch)))
    return path[0]


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


def shortened(words: Sequence[str], most: int = 12) -> str:
    """The first and the last of many words."""
    if len(words) <= most:
        return " ".join(words)
    return " ".join([*words[: most // 2], "\u2026", *words[-(most // 2) :]])


def where(pages: Sequence[int]) -> str:
    """Page numbers, neighbours taken together."""
    pieces = [str(first) if n == 1 else f"{first}-{first + n - 1}" for first, n in runs(pages)]
    return f"{'page' if len(pages) == 1 else 'pages'} {shortened(pieces, 6)}"


def counted(number: int, name: str) -> str:
    return f"{number} {name}{'' if number == 1 else 's'}"

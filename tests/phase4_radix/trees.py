"""Pages of two tokens, and the shape of a tree."""

from collections.abc import Sequence

from phase4_radix.extras.nodes import nodes_of
from phase4_radix.radix_tree import RadixTree

A, B, C, D = (1, 2), (3, 4), (5, 6), (7, 8)


def flat(*pages: Sequence[int]) -> list[int]:
    return [token for page in pages for token in page]


def shape(tree: RadixTree) -> list[tuple[int, list[int], list[int], int]]:
    """Depth, tokens, pages and reference count of every node."""
    return [(node.depth, node.tokens, node.pages, node.ref_count) for node in nodes_of(tree)]

"""The nodes of a radix tree as copies: for checks, drawings and the snapshot of a record."""

from array import array
from collections.abc import Iterator
from typing import NamedTuple

from phase4_radix.page_keys import TOKEN_BYTES
from phase4_radix.radix_tree import ROOT, RadixTree


class NodeView(NamedTuple):
    """A copy of a node."""

    node: int
    depth: int  # 1 for children of the root
    salt: str  # only children of the root have one
    tokens: list[int]
    pages: list[int]
    ref_count: int
    last_used: int


def nodes_of(tree: RadixTree) -> Iterator[NodeView]:
    """Copies of all nodes but the root, parents before their children."""
    stack = [(child, 1) for child in reversed(tree.nodes[ROOT].children.values())]
    width = tree.page_size * TOKEN_BYTES
    while stack:
        number, depth = stack.pop()
        node = tree.nodes[number]
        salt = node.key[0][:-width].decode("utf-8", "surrogatepass")
        tokens = array("i", b"".join([page[-width:] for page in node.key])).tolist()
        yield NodeView(number, depth, salt, tokens, list(node.pages), node.ref_count, node.last_used)
        stack += [(child, depth + 1) for child in reversed(node.children.values())]


def path_to(tree: RadixTree, node: int) -> list[int]:
    """The nodes from the root, which is left out, down to this one."""
    path: list[int] = []
    while node != ROOT:
        path.append(node)
        node = tree.nodes[node].parent
    return path[::-1]

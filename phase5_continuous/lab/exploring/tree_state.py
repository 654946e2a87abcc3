"""The radix tree as integers, and back: nodes and pages have the numbers of their order."""

from typing import Any

from phase4_radix.eviction import NODE_BITS
from phase4_radix.radix_tree import NO_PARENT, ROOT, Node, RadixTree


def read_tree(tree: RadixTree, nodes: dict[int, int], pages: dict[int, int]) -> tuple[Any, ...]:
    """The counters of a tree, and its nodes, each after its parent. They and their pages are numbered in this order."""
    order, stack = [], [ROOT]
    while stack:
        number = stack.pop()
        children = tree.nodes[number].children
        for key in sorted(children, reverse=True):
            stack.append(children[key])
        if number != ROOT:
            nodes[number] = len(nodes)
            order.append((number, tree.nodes[number]))
    ranks = {time: rank for rank, time in enumerate(sorted({node.last_used for _, node in order}))}
    leaves = tree.leaves.items()
    return (
        (tree.num_pages, tree.num_locked, len(leaves)),
        *[
            (
                nodes[node.parent],
                tuple(node.key),
                tuple([pages.setdefault(page, len(pages)) for page in node.pages]),
                node.ref_count,
                ranks[node.last_used],
                (number, node.last_used) in leaves,
            )
            for number, node in order
        ],
    )


def write_tree(tree: RadixTree, state: tuple[Any, ...], counts: list[int]) -> None:
    """Make a tree of these nodes, and count their pages."""
    made = [Node(NO_PARENT, [], [], {}, 1)]
    tree.num_pages = tree.num_locked = 0
    latest = 0
    for parent, key, pages, ref_count, used, _ in state[1:]:
        made[parent].children[key[0]] = len(made)
        made.append(Node(parent, [*key], [*pages], {}, ref_count, used + 1))
        tree.num_pages += len(pages)
        latest = max(latest, used + 1)
        if ref_count:
            tree.num_locked += len(pages)
        for page in pages:
            counts[page] += 1
    tree.nodes, tree.free, tree._clock = made, [], latest
    entries = {
        number: node.last_used << NODE_BITS | number
        for number, node in enumerate(made)
        if number and not node.ref_count and not node.children
    }
    tree.leaves._entries, tree.leaves._heap = entries, sorted(entries.values())

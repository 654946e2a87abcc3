"""Locks: which nodes they protect, and when nodes are split and merged."""

from phase4_radix.extras.invariants import check_tree
from phase4_radix.extras.nodes import nodes_of
from phase4_radix.radix_tree import RadixTree
from tests.phase4_radix.trees import A, B, C, D, flat, shape


def test_a_lock_ends_where_the_match_ends() -> None:
    """Only the matched part of a long node is locked; the rest can be evicted."""
    tree = RadixTree(2)
    tree.insert(flat(A, B, C, D), [0, 1, 2, 3])
    node = tree.split(tree.match(flat(A, B, A)))
    tree.lock(node)
    assert shape(tree) == [(1, flat(A, B), [0, 1], 1), (2, flat(C, D), [2, 3], 0)]
    assert sorted(tree.evict(9)) == [2, 3]
    assert tree.match(flat(A, B, C)).pages == [0, 1]
    tree.unlock(node)
    assert sorted(tree.evict(9)) == [0, 1]
    assert (len(tree), tree.num_pages) == (0, 0)
    check_tree(tree)


def test_a_split_is_undone_when_its_lock_is_released_unused() -> None:
    """An unused lock leaves the tree as it was. A used one leaves two nodes, since they are evicted at different times,
    until both are used together again."""
    tree = RadixTree(2)
    for page, tokens in enumerate((A, D)):
        tree.insert(flat(tokens, B, C), [3 * page, 3 * page + 1, 3 * page + 2])
    before = list(nodes_of(tree))
    for used in (False, True):
        node = tree.split(tree.match(flat(A, B)))
        tree.lock(node)
        assert len(tree) == 3
        tree.unlock(node, used)
        check_tree(tree)
        assert (list(nodes_of(tree)) == before) is not used
    tree.lock(node)
    tree.unlock(node, used=False)
    assert len(tree) == 3
    tree.insert(flat(A, B, C), [90, 91, 92])
    assert len(tree) == 2
    evicted = [sorted(tree.evict(2)) for _ in range(3)]
    assert evicted == [[4, 5], [2, 3], [0, 1]], f"evicted in pairs, the oldest first: {evicted}"


def test_a_use_merges_all_nodes_of_its_path() -> None:
    tree = RadixTree(2)
    tree.insert(flat(A, B, C, D), [0, 1, 2, 3])
    ends = [tree.split(tree.match(tokens)) for tokens in (flat(A), flat(A, B))]
    for end in ends:
        tree.lock(end)
    for end in reversed(ends):
        tree.unlock(end)
    assert [node.pages for node in nodes_of(tree)] == [[0], [1], [2, 3]], "page 0 alone was used last"
    tree.insert(flat(A, B, C, D), [4, 5, 6, 7])
    pages = [node.pages for node in nodes_of(tree)]
    assert pages == [[0, 1, 2, 3]], f"four pages were used together, without a lock; nodes: {pages}"
    check_tree(tree)

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
    wanted = [(1, flat(A, B), [0, 1], 1), (2, flat(C, D), [2, 3], 0)]
    found = shape(tree)
    assert found == wanted, f"(depth, tokens, pages, references) with the first two of four pages locked: {found}"
    check_tree(tree)
    evicted = sorted(tree.evict(9))
    assert evicted == [2, 3], f"pages 0 and 1 are locked, 2 and 3 are not, and {evicted} are evicted"
    assert tree.match(flat(A, B, C)).pages == [0, 1]
    tree.unlock(node)
    evicted = sorted(tree.evict(9))
    assert evicted == [0, 1], f"pages 0 and 1 are unlocked now, and {evicted} are evicted"
    assert (len(tree), tree.num_pages) == (0, 0), "nodes and pages of a tree that has evicted everything"
    check_tree(tree)


def test_as_many_pages_are_evicted_as_are_needed_from_the_end_of_the_oldest_leaves() -> None:
    tree = RadixTree(2)
    for page, tokens in enumerate((flat(A, B), flat(D, C), flat(D, B))):  # the last two share their first page
        tree.insert(tokens, [2 * page, 2 * page + 1])
    left = [tree.evict(count) for count in (1, 2, 1, 9)]
    wanted = [[1], [0, 3], [5], [2]]
    assert [sorted(pages) for pages in left] == wanted, f"1, 2, 1 and then all pages, the oldest leaf first: {left}"
    assert (len(tree), tree.num_pages) == (0, 0), "nodes and pages of a tree that has evicted everything"
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
        assert len(tree) == 3, f"a node of three pages is split after two, beside another, and there are {len(tree)}"
        tree.unlock(node, used)
        check_tree(tree)
        undone = list(nodes_of(tree)) == before
        assert undone is not used, f"a lock is released, used: {used}; its split is undone: {undone}"
    tree.lock(node)
    tree.unlock(node, used=False)
    assert len(tree) == 3, "the upper part was used last, alone: the two parts are not evicted together"
    tree.insert(flat(A, B, C), [90, 91, 92])
    assert len(tree) == 2, "both parts were used together: one node again"
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

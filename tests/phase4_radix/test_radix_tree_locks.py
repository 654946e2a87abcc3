"""Locks: where they end, and which nodes are split and joined for them."""

from phase4_radix.radix_tree import RadixTree
from tests.phase4_radix.trees import A, B, C, D, flat, shape


def test_a_lock_ends_where_the_match_ends() -> None:
    """Of a long run only what is used is held, and the rest can be evicted."""
    tree = RadixTree(2)
    tree.insert(flat(A, B, C, D), [0, 1, 2, 3])
    node = tree.cut(tree.match(flat(A, B, A)))
    tree.lock(node)
    assert shape(tree) == [(1, flat(A, B), [0, 1], 1), (2, flat(C, D), [2, 3], 0)]
    assert sorted(tree.evict(9)) == [2, 3]
    assert tree.match(flat(A, B, C)).pages == [0, 1]
    tree.unlock(node)
    assert sorted(tree.evict(9)) == [0, 1]
    assert (len(tree), tree.num_pages) == (0, 0)
    tree.check()


def test_a_locked_node_keeps_its_number_and_its_end_when_its_run_is_split() -> None:
    tree = RadixTree(2)
    end = tree.insert(flat(A, B, C), [0, 1, 2]).node
    tree.lock(end)
    tree.insert(flat(A, D), [3, 4])
    tree.lock(tree.cut(tree.match(flat(A, B))))
    assert [page for node in tree.path(end) for page in tree._nodes[node].pages] == [0, 1, 2]
    assert [tree._nodes[node].locks for node in tree.path(end)] == [2, 2, 1]
    tree.unlock(end)
    assert (tree.num_pages, tree.num_locked) == (4, 2)
    tree.check()


def test_who_writes_on_makes_the_node_longer_unless_others_count_on_its_end() -> None:
    tree = RadixTree(2)
    node = tree.insert(flat(A), [0]).node
    tree.lock(node)
    assert tree.insert(flat(B), [1], after=node).node == node
    assert shape(tree) == [(1, flat(A, B), [0, 1], 1)]
    assert tree.num_locked == 2
    tree.lock(node)  # somebody else
    other = tree.insert(flat(C), [2], after=node).node
    assert shape(tree) == [(1, flat(A, B), [0, 1], 2), (2, flat(C), [2], 0)]
    tree.unlock(node)
    assert tree.insert(flat(D), [3], after=node).node not in (node, other)  # something follows already
    assert len(tree) == 3
    tree.check()


def test_two_who_write_on_side_by_side_leave_one_node() -> None:
    """Each page gets a node of its own, since both count on where the last one ends; once both have moved on, it is
    joined with the one above it."""
    tree = RadixTree(1)
    ends = [tree.insert([0], [0]).node] * 2
    for _ in ends:
        tree.lock(ends[0])
    for page in range(1, 50):
        for who, end in enumerate(ends):
            ends[who] = tree.insert([page], [page + 50 * who], after=end).node
            tree.lock(ends[who])
            tree.unlock(end, used=False)
            tree.check()
            assert len(tree) == 2 - who
    assert shape(tree) == [(1, [*range(50)], [*range(50)], 2)]


def test_a_split_that_came_to_nothing_is_undone() -> None:
    """A lock that was no use leaves the tree as it was, though a run was split for it. A use leaves two nodes, for they
    are evicted at different times, until both are used again."""
    tree = RadixTree(2)
    for page, tokens in enumerate((A, D)):
        tree.insert(flat(tokens, B, C), [3 * page, 3 * page + 1, 3 * page + 2])
    before = list(tree.branches())
    for used in (False, True):
        node = tree.cut(tree.match(flat(A, B)))
        tree.lock(node)
        assert len(tree) == 3
        tree.unlock(node, used)
        tree.check()
        assert (list(tree.branches()) == before) is not used
    tree.lock(node)
    tree.unlock(node, used=False)
    assert len(tree) == 3
    tree.insert(flat(A, B, C), [90, 91, 92])
    assert len(tree) == 2
    assert [tree.evict(2) for _ in range(3)] == [[4, 5], [3, 2], [0, 1]]


def test_where_a_lock_ends_or_another_begins_nothing_is_joined() -> None:
    tree = RadixTree(2)
    tree.insert(flat(A, B, C), [0, 1, 2])
    upper = tree.cut(tree.match(flat(A)))
    tree.lock(upper)
    tree.insert(flat(A, B, C), [3, 4, 5])  # both parts are used at once, but the lock ends between them
    assert [len(branch.pages) for branch in tree.branches()] == [1, 2]
    tree.insert(flat(A, D), [6, 7])
    tree.unlock(upper)
    tree.insert(flat(A, B, C), [8, 9, 10])
    assert [len(branch.pages) for branch in tree.branches()] == [1, 2, 1]
    tree.check()


def test_what_comes_from_the_root_does_not_move_the_end_of_anothers_lock() -> None:
    tree = RadixTree(2)
    node = tree.insert(flat(A), [0]).node
    tree.lock(node)
    tree.insert(flat(A, B), [1, 2])
    assert shape(tree) == [(1, flat(A), [0], 1), (2, flat(B), [2], 0)]

"""What is forgotten first, how far, and what is left."""

import pytest

from phase1_kv_pool import PageError
from phase4_radix.radix_tree import ROOT, RadixTree
from tests.phase4_radix.trees import A, B, C, D, flat, shape


def test_the_least_recently_used_goes_first() -> None:
    tree = RadixTree(2)
    nodes = [tree.insert(page, [number]).node for number, page in enumerate((A, B, C, D))]
    tree.lock(nodes[0])
    tree.unlock(nodes[0])  # used now
    tree.insert(B, [9])  # used now
    assert [tree.evict(1) for _ in range(5)] == [[2], [3], [0], [1], []]


def test_a_cut_is_no_use() -> None:
    """Both halves were last used when the whole was."""
    tree = RadixTree(2)
    tree.insert(flat(A, B), [0, 1])
    tree.insert(flat(C), [2])
    tree.cut(tree.match(flat(A)))
    tree.check()
    assert [tree.evict(1) for _ in range(3)] == [[1], [0], [2]]


def test_a_run_is_evicted_from_its_end_and_only_as_far_as_needed() -> None:
    tree = RadixTree(2)
    tree.insert(flat(A, B, C), [0, 1, 2])
    tree.insert(flat(D), [3])
    assert tree.evict(2) == [1, 2]
    assert tree.match(flat(A, B, C)).pages == [0]
    assert tree.evict(1) == [0]
    assert tree.evict(0) == []
    assert tree.evict(4) == [3]
    tree.check()


def test_a_parent_can_go_when_its_last_child_has_gone(tree: RadixTree) -> None:
    tree.unlock(tree.match(flat(A, B, D)).node)
    assert tree.evict(1) == [12]
    assert tree.evict(1) == [22]
    assert sorted(tree.evict(2)) == [10, 11]
    assert len(tree) == 0


def test_numbers_of_nodes_are_used_again(tree: RadixTree) -> None:
    tree.unlock(tree.match(flat(A, B, D)).node)
    arena = len(tree._nodes)
    for _ in range(50):
        tree.evict(99)
        tree.insert(flat(A, B, C), [0, 1, 2])
        tree.insert(flat(A, D), [3, 4])
        tree.check()
    assert len(tree._nodes) == arena


def test_remove_takes_all_that_follows(tree: RadixTree) -> None:
    top = tree.path(tree.match(flat(A, B, D)).node)[0]
    with pytest.raises(PageError, match=f"node {top} is locked"):
        tree.remove(top)
    tree.unlock(tree.match(flat(A, B, D)).node)
    with pytest.raises(PageError, match="node 0 is locked"):
        tree.remove(ROOT)
    tree.insert(flat(D), [30])
    assert sorted(tree.remove(top)) == [10, 11, 12, 22]
    assert shape(tree) == [(1, flat(D), [30], 0)]
    tree.check()
    with pytest.raises(PageError, match=f"node {top} is not in the tree"):
        tree.remove(top)

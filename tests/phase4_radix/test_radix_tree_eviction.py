"""The order of eviction, and what is left."""

from phase4_radix.extras.invariants import check_tree
from phase4_radix.radix_tree import RadixTree
from tests.phase4_radix.trees import A, B, C, D, flat


def test_a_leaf_is_evicted_from_its_end_and_only_as_far_as_needed() -> None:
    tree = RadixTree(2)
    tree.insert(flat(A, B, C), [0, 1, 2])
    tree.insert(flat(D), [3])
    evicted = sorted(tree.evict(2))
    assert evicted == [1, 2], f"two of the pages 0, 1, 2 of the oldest leaf are needed; evicted: {evicted}"
    assert tree.match(flat(A, B, C)).pages == [0]
    assert tree.evict(1) == [0]
    assert tree.evict(0) == []
    assert tree.evict(4) == [3]
    check_tree(tree)


def test_an_unused_lock_leaves_a_leaf_that_can_be_evicted() -> None:
    tree = RadixTree(2)
    node = tree.insert(flat(A), [0]).node
    tree.lock(node)
    tree.unlock(node, used=False)
    evicted = tree.evict(1)
    assert evicted == [0], f"page 0 is unlocked, unused by that lock, and can be evicted; evicted: {evicted}"


def test_entries_of_the_arena_are_reused(tree: RadixTree) -> None:
    tree.unlock(tree.match(flat(A, B, D)).node)
    arena = len(tree.nodes)
    for _ in range(50):
        tree.evict(99)
        tree.insert(flat(A, B, C), [0, 1, 2])
        tree.insert(flat(A, D), [3, 4])
        check_tree(tree)
    assert len(tree.nodes) == arena

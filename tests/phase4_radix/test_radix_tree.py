"""Matching, inserting, and the cost of every operation."""

import copy
import gc
import sys
from array import array
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phase1_kv_pool import PageError
from phase4_radix.extras.invariants import check_tree
from phase4_radix.extras.nodes import nodes_of
from phase4_radix.page_keys import common_pages, page_keys
from phase4_radix.radix_tree import ROOT, RadixTree
from tests.phase4_radix.trees import A, B, C, D, flat, shape


def test_a_page_becomes_the_bytes_of_its_tokens() -> None:
    pages = [array("i", page).tobytes() for page in (A, B)]
    assert page_keys(flat(A, B), 2) == pages
    assert page_keys([*A, *B, 9], 2) == pages, "the incomplete page is not left out"
    assert page_keys([7], 2) == page_keys([], 2) == page_keys([7], 2, "salt") == []
    salted = page_keys(flat(A, B), 2, "\u00e9\ud800")
    assert salted == [b"\xc3\xa9\xed\xa0\x80" + pages[0], pages[1]], "the salt stands before the first page only"


keys = st.lists(st.sampled_from([b"a", b"b"]), max_size=9)


@given(keys, keys, st.data())
def test_common_pages_are_counted_from_the_start(key: list[bytes], other: list[bytes], data: st.DataObject) -> None:
    start = data.draw(st.integers(0, len(other)))
    agree = 0
    while agree < min(len(key), len(other) - start) and key[agree] == other[start + agree]:
        agree += 1
    assert common_pages(key, other, start) == agree, f"{key} and {other}, from page {start}, agree on {agree} pages"


def test_common_pages_are_not_compared_one_by_one() -> None:
    key = page_keys(range(10_000), 1)
    for other, agree in ((list(key), 10_000), ([*key[:4000], b""], 4000)):
        lines = lines_of(lambda other=other: common_pages(key, other, 0))  # type: ignore[misc]
        assert common_pages(key, other, 0) == agree
        assert lines < 200, f"{lines} lines of Python run to compare keys of {len(key):,} pages"


@pytest.mark.proof
def test_prefixes_split_where_they_diverge(tree: RadixTree) -> None:
    wanted = [(1, flat(A, B), [10, 11], 1), (2, flat(C), [12], 0), (2, flat(D), [22], 1)]
    assert shape(tree) == wanted, "pages 10 to 12, then 20 to 22, two of them the same prefix"
    assert (tree.num_pages, tree.num_locked, tree.num_evictable, len(tree)) == (4, 3, 1, 3)
    check_tree(tree)


def test_a_walk_ends_where_tree_and_key_differ() -> None:
    tree = RadixTree(2)
    upper, _ = tree.insert(flat(A, B, C), [0, 1, 2])
    tree.lock(upper)
    tree.lock(upper)  # two locks: what follows gets a node of its own
    lower, _ = tree.insert(flat(D, A), [3, 4], after=upper)
    ends = {
        "none of its pages is cached": (flat(D), (ROOT, 0, [])),
        "its second page differs": (flat(A, D), (upper, 1, [0])),
        "its second page is not whole": ([*A, 3], (upper, 1, [0])),
        "it ends with a node": (flat(A, B, C), (upper, 3, [0, 1, 2])),
        "the page after a node differs": (flat(A, B, C, C), (upper, 3, [0, 1, 2])),
        "it ends inside the second node": (flat(A, B, C, D), (lower, 1, [0, 1, 2, 3])),
        "all of it is cached": (flat(A, B, C, D, A), (lower, 2, [0, 1, 2, 3, 4])),
    }
    for how, (tokens, wanted) in ends.items():
        found = tuple(tree.match(tokens))
        assert found == wanted, f"{how}: (node, offset, pages) of {tokens} is {found}, expected {wanted}"


def test_a_match_changes_nothing(tree: RadixTree) -> None:
    """Not even the time of last use."""
    before = copy.deepcopy(vars(tree) | {"leaves": vars(tree.leaves)})
    for tokens in (flat(A), flat(A, B, C), flat(A, D), flat(D)):
        tree.match(tokens)
        assert vars(tree) | {"leaves": vars(tree.leaves)} == before, f"matching {tokens} has changed the tree"


def test_salts_share_nothing() -> None:
    tree = RadixTree(2)
    salts = ["", "a", "b", "ab", "\ud800", "a" * 256]
    for number, salt in enumerate(salts):
        found = tree.match(flat(A, B), salt).pages
        assert found == [], f"pages {found} of salts {salts[:number]} are found with salt {salt!r}"
        assert tree.insert(flat(A, B), [2 * number, 2 * number + 1], salt)[1] == []
    for number, salt in enumerate(salts):
        found = tree.match(flat(A, B), salt).pages
        assert found == [2 * number, 2 * number + 1], f"pages {found} are found with salt {salt!r}"
    assert [node.salt for node in nodes_of(tree)] == salts
    small = RadixTree(1)
    small.insert([0x61616161, 5], [0, 1])  # a salt with the bytes of a token is not that token
    assert small.match([5], "aaaa").pages == []
    assert small.match([0x61616161, 5], "aaaa").pages == []


def test_a_salt_counts_only_at_the_root() -> None:
    tree = RadixTree(2)
    node, _ = tree.insert(flat(A), [0], "salt")
    tree.lock(node)
    tree.insert(flat(B), [1], "salt", after=node)
    found = tree.match(flat(A, B), "salt").pages
    assert found == [0, 1], f"page 1 stands behind page 0, which has the salt of both; found: {found}"


def test_misuse_is_an_error(tree: RadixTree) -> None:
    leaf = tree.match(flat(A, B, C)).node
    for act in (tree.lock, tree.unlock):
        with pytest.raises(PageError, match="node -1 is not in the tree"):
            act(-1)
    with pytest.raises(PageError, match=f"node {leaf} is not locked"):
        tree.unlock(leaf)
    with pytest.raises(PageError, match=f"node {leaf} is not locked"):
        tree.insert(flat(D), [50], after=leaf)
    with pytest.raises(ValueError, match="3 tokens do not fill 1 pages of 2"):
        tree.insert([1, 2, 3], [1])
    check_tree(tree)


def lines_of(act: Callable[[], Any]) -> int:
    """How many lines of Python run: a cost that does not depend on the machine."""
    count = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    collects = gc.isenabled()
    gc.disable()  # a collection may call Python of others
    sys.settrace(trace)
    try:
        act()
    finally:
        sys.settrace(before)
        if collects:
            gc.enable()
    return count


@pytest.mark.parametrize("act", ["evict", "match", "insert", "lock", "unlock"])
def test_no_operation_walks_the_tree(act: str) -> None:
    """As many lines of Python run in a tree of ten thousand leaves as in one of a hundred."""

    def lines(leaves: int) -> int:
        tree = RadixTree(1)
        for token in range(leaves):
            tree.insert([token, token], [2 * token, 2 * token + 1])
        acts: dict[str, Callable[[], Any]] = {
            "evict": lambda: tree.evict(50),
            "match": lambda: tree.match([5, 5, 5]),
            "insert": lambda: tree.insert([5, 6], [-1, -2]),
            "lock": lambda: tree.lock(7),
            "unlock": lambda: tree.unlock(ROOT, used=False),
        }
        return lines_of(acts[act])

    small, large = lines(100), lines(10_000)
    assert 0 < large == small, f"{act} runs {small} lines of Python with 100 leaves, and {large} with 10,000"


def test_a_tree_deeper_than_the_recursion_limit() -> None:
    tree, node, deep = RadixTree(1), ROOT, sys.getrecursionlimit() + 100
    for token in range(deep):
        node, _ = tree.insert([token], [token], after=node)
        tree.lock(node)
        tree.lock(node)  # two locks: the next page gets a node of its own
    assert len(tree) == deep, f"{deep} pages continue a node with two locks each, and the tree has {len(tree)} nodes"
    check_tree(tree)
    found = len(tree.match(range(deep)).pages)
    assert found == deep, f"of a path of {deep} nodes, {found} pages are found"
    assert [node.depth for node in nodes_of(tree)] == list(range(1, deep + 1))


def test_entries_of_the_arena_are_reused(tree: RadixTree) -> None:
    tree.unlock(tree.match(flat(A, B, D)).node)
    arena = len(tree.nodes)
    for _ in range(50):
        tree.evict(99)
        tree.insert(flat(A, B, C), [0, 1, 2])
        tree.insert(flat(A, D), [3, 4])
        check_tree(tree)
    assert len(tree.nodes) == arena


@pytest.mark.parametrize(
    ("breakage", "message"),
    [
        (lambda t: t.free.append(2), "1 free"),
        (lambda t: t.nodes[1].pages.append(5), "has 2 pages for a key of 1"),
        (lambda t: setattr(t.nodes[2], "parent", 1), "is not the child that node"),
        (lambda t: t.nodes[1].key.__setitem__(0, b"12"), "is not the child"),
        (lambda t: t.nodes[1].pages.__setitem__(0, 22), "twice"),
        (lambda t: setattr(t, "num_pages", 5), "counts 5 pages"),
        (lambda t: setattr(t, "num_locked", 2), "2 locked"),
        (lambda t: setattr(t.nodes[3], "ref_count", 2), "fewer references than its children"),
        (lambda t: t.leaves.discard(1), "unlocked leaves and the eviction queue differ"),
        (lambda t: t.leaves.add(3, 9), "unlocked leaves and the eviction queue differ"),
        (lambda t: setattr(t.nodes[1], "last_used", 9), "node 1 was used after its parent 2"),
        (lambda t: setattr(t.nodes[3], "ref_count", 0) or setattr(t.nodes[2], "ref_count", 0), "of them locked"),
    ],
)
def test_check_finds_corruption(tree: RadixTree, breakage: Callable[[RadixTree], object], message: str) -> None:
    check_tree(tree)
    breakage(tree)
    with pytest.raises(PageError, match=message):
        check_tree(tree)


def test_a_check_changes_nothing(tree: RadixTree) -> None:
    for _ in range(3):
        tree.insert(flat(A, D), [3, 4], after=ROOT)  # each use leaves a stale entry in the eviction queue
    before = copy.deepcopy(vars(tree.leaves))
    check_tree(tree)
    assert vars(tree.leaves) == before

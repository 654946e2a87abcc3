import copy
import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from rich.console import Console

from phase1_kv_pool import PageError
from phase4_radix.radix_tree import ROOT, RadixTree

A, B, C, D = (1, 2), (3, 4), (5, 6), (7, 8)  # pages of two tokens


def flat(*pages: Sequence[int]) -> list[int]:
    return [token for page in pages for token in page]


def shape(tree: RadixTree) -> list[tuple[int, list[int], list[int], int]]:
    """Depth, tokens, pages and locks of every node."""
    return [(b.depth, b.tokens, b.pages, b.locks) for b in tree.branches()]


@pytest.fixture
def tree() -> RadixTree:
    """Two prefixes that part after two of three pages, the second locked."""
    tree = RadixTree(2)
    tree.insert(flat(A, B, C), [10, 11, 12])
    tree.lock(tree.insert(flat(A, B, D), [20, 21, 22]).node)
    return tree


@pytest.mark.proof
def test_prefixes_part_where_they_differ(tree: RadixTree) -> None:
    assert shape(tree) == [
        (1, flat(A, B), [10, 11], 1),
        (2, flat(C), [12], 0),
        (2, flat(D), [22], 1),
    ]
    assert (tree.num_pages, tree.num_locked, tree.num_evictable, len(tree)) == (4, 3, 1, 3)
    tree.check()


@pytest.mark.parametrize(
    ("tokens", "pages"),
    [
        (flat(A, B, C), [10, 11, 12]),
        (flat(A, B, D), [10, 11, 22]),
        (flat(A, B, D, A), [10, 11, 22]),
        (flat(A, B), [10, 11]),
        (flat(A, C), [10]),
        (flat(A, (3, 9)), [10]),  # half a page alike is not alike
        (flat(A, (3,)), [10]),  # half a page is none
        (flat(B), []),
        ([1], []),
        ([], []),
    ],
)
def test_a_match_is_the_longest_prefix_in_whole_pages(tree: RadixTree, tokens: list[int], pages: list[int]) -> None:
    assert tree.match(tokens).pages == pages
    assert tree.match(tuple(tokens)).pages == pages


def test_a_match_changes_nothing(tree: RadixTree) -> None:
    """Not even a time of use: looking is not using."""
    before = copy.deepcopy(vars(tree) | {"_leaves": vars(tree._leaves)})
    for tokens in (flat(A), flat(A, B, C), flat(A, D), flat(D)):
        tree.match(tokens)
    assert vars(tree) | {"_leaves": vars(tree._leaves)} == before


def test_what_was_there_already_is_returned_and_not_replaced(tree: RadixTree) -> None:
    held = tree.insert(flat(A, B, C, D), [30, 31, 32, 33])
    assert held.pages == [10, 11, 12]
    assert tree.match(flat(A, B, C, D)).pages == [10, 11, 12, 33]
    again = tree.insert(flat(A, B, C, D), [40, 41, 42, 43])
    assert (again.node, again.pages) == (held.node, [10, 11, 12, 33])
    assert tree.num_pages == 5
    inner = tree.insert(flat(A), [50])  # ends inside a run
    assert inner.pages == [10]
    assert tree.branches().__next__().tokens == flat(A)
    tree.check()


def test_equal_hashes_are_not_equal_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Were every page to fall into one bucket of the children, tokens would still be told apart: they are compared."""

    class Colliding(bytes):
        def __hash__(self) -> int:
            return 7

    from phase4_radix import radix_tree

    original = radix_tree.in_pages
    monkeypatch.setattr(radix_tree, "in_pages", lambda *given: [Colliding(page) for page in original(*given)])
    tree = RadixTree(2)
    for number, page in enumerate((A, B, C, D)):
        tree.insert(page, [number])
    assert [tree.match(page).pages for page in (A, B, C, D)] == [[0], [1], [2], [3]]
    assert tree.match((9, 9)).pages == []


def test_salts_share_nothing() -> None:
    tree = RadixTree(2)
    salts = ["", "a", "b", "ab", "\ud800", "a" * 256]
    for number, salt in enumerate(salts):
        assert tree.match(flat(A, B), salt).pages == []
        assert tree.insert(flat(A, B), [2 * number, 2 * number + 1], salt).pages == []
    for number, salt in enumerate(salts):
        assert tree.match(flat(A, B), salt).pages == [2 * number, 2 * number + 1]
    assert [branch.salt for branch in tree.branches()] == salts
    # A salt cannot be chosen so that it reads like the tokens of somebody else.
    small = RadixTree(1)
    small.insert([0x61616161, 5], [0, 1])
    assert small.match([5], "aaaa").pages == []
    assert small.match([0x61616161, 5], "aaaa").pages == []


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


def test_misuse_is_an_error(tree: RadixTree) -> None:
    leaf = tree.match(flat(A, B, C)).node
    for act in (tree.lock, tree.unlock, tree.path):
        for number in (99, -1):
            with pytest.raises(PageError, match=f"node {number} is not in the tree"):
                act(number)
    with pytest.raises(PageError, match=f"node {leaf} is not locked"):
        tree.unlock(leaf)
    with pytest.raises(PageError, match=f"node {leaf} is not locked"):
        tree.insert(flat(D), [50], after=leaf)
    for tokens, pages in ((flat(A), [1, 2]), ([1, 2, 3], [1]), (flat(A, B), [1])):
        with pytest.raises(ValueError, match=f"{len(pages)} pages of 2 cannot hold just {len(tokens)} tokens"):
            tree.insert(tokens, pages)
    tree.check()


@pytest.mark.parametrize("act", ["evict", "match", "insert", "lock", "unlock"])
def test_no_operation_walks_the_tree(act: str) -> None:
    """The lines of Python that run are counted: as many in a tree of ten thousand leaves as in one of a hundred."""

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
        count = 0

        def trace(frame: FrameType, event: str, argument: Any) -> Any:
            nonlocal count
            count += event == "line"
            return trace

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            acts[act]()
        finally:
            sys.settrace(before)
        return count

    assert 0 < lines(10_000) == lines(100)


def test_a_tree_deeper_than_the_stack_of_python() -> None:
    tree, node, deep = RadixTree(1), ROOT, sys.getrecursionlimit() + 100
    for token in range(deep):
        node = tree.insert([token], [token], after=node).node
        tree.lock(node)
        tree.lock(node)  # two who count on where it ends: what follows gets a node of its own
    assert len(tree) == deep
    tree.check()
    assert tree.match(range(deep)).pages == list(range(deep))
    assert [branch.depth for branch in tree.branches()] == list(range(1, deep + 1))


@pytest.mark.parametrize(
    ("breakage", "message"),
    [
        (lambda t: t._unused.append(2), "1 unused"),
        (lambda t: t._nodes[1].pages.append(5), "has no pages for its run"),
        (lambda t: setattr(t._nodes[2], "parent", 1), "does not hang where node"),
        (lambda t: t._nodes[1].run.__setitem__(0, b"12"), "does not hang|not full"),
        (lambda t: t._nodes[1].pages.__setitem__(0, 22), "twice"),
        (lambda t: setattr(t, "num_pages", 5), "counts 5 pages"),
        (lambda t: setattr(t, "num_locked", 2), "2 locked ones"),
        (lambda t: setattr(t._nodes[3], "locks", 2), "fewer locks than those below"),
        (lambda t: t._leaves.discard(1), "not to be evicted"),
        (lambda t: t._leaves.add(3, 9), "not to be evicted"),
        (lambda t: setattr(t._nodes[3], "locks", 0) or setattr(t._nodes[2], "locks", 0), "of them locked"),
    ],
)
def test_check_finds_what_is_wrong(tree: RadixTree, breakage: Callable[[RadixTree], object], message: str) -> None:
    tree.check()
    breakage(tree)
    with pytest.raises(PageError, match=message):
        tree.check()


def test_check_finds_a_use_that_was_not_told_to_the_parent() -> None:
    tree = RadixTree(2)
    tree.insert(flat(A, B), [0, 1])
    tree.insert(flat(A, C), [2, 3])
    child = tree.match(flat(A, C)).node
    tree._nodes[child].used += 1
    with pytest.raises(PageError, match=f"node {child} was used after"):
        tree.check()


def test_it_draws_itself(tree: RadixTree) -> None:
    tree.insert(list(range(100, 140)), list(range(40, 60)), "tenant")
    console = Console(width=100, no_color=True)
    with console.capture() as captured:
        console.print(tree.draw())
    assert [line.rstrip() for line in captured.get().splitlines()] == [
        "24 pages in 4 nodes, 3 locked",
        "├── 1 2 3 4  pages 10-11  1 lock",
        "│   ├── 5 6  page 12",
        "│   └── 7 8  page 22  1 lock",
        "└── tenant: 100 101 102 103 104 105 … 134 135 136 137 138 139  pages 40-59",
    ]


Prefix = tuple[str, tuple[int, ...]]  # salt, tokens


class AgainstADictOfPrefixes(RuleBasedStateMachine):
    """The model is a dict from every known prefix, in whole pages, to the page where it ends. It has no nodes."""

    rules_run = splits = evicted = 0
    prompts = st.lists(st.integers(0, 1), max_size=9)
    pick = st.integers(0, 99)
    salts = st.sampled_from(["", "", "s"])

    @initialize(page_size=st.integers(1, 2))
    def start(self, page_size: int) -> None:
        self.size = page_size
        self.tree = RadixTree(page_size)
        self.pages: dict[Prefix, int] = {}
        self.used: dict[Prefix, int] = {}
        self.locks: list[tuple[int, Prefix]] = []
        self.now = self.made = 0

    def prefixes(self, salt: str, tokens: Sequence[int]) -> list[Prefix]:
        return [(salt, tuple(tokens[:stop])) for stop in range(self.size, len(tokens) + 1, self.size)]

    def known(self, salt: str, tokens: Sequence[int]) -> list[Prefix]:
        return [prefix for prefix in self.prefixes(salt, tokens) if prefix in self.pages]

    def held(self) -> set[Prefix]:
        return {prefix for _, (salt, tokens) in self.locks for prefix in self.prefixes(salt, tokens)}

    def touch(self, prefixes: Sequence[Prefix]) -> None:
        self.now += 1
        self.used |= dict.fromkeys(prefixes, self.now)

    def new_pages(self, number: int) -> list[int]:
        self.made += number
        return list(range(self.made - number, self.made))

    def whole(self, tokens: list[int]) -> list[int]:
        return tokens[: len(tokens) // self.size * self.size]

    @rule(tokens=prompts, salt=salts)
    def match(self, tokens: list[int], salt: str) -> None:
        assert self.tree.match(tokens, salt).pages == [self.pages[p] for p in self.known(salt, tokens)]

    @rule(tokens=prompts, salt=salts)
    def insert(self, tokens: list[int], salt: str) -> None:
        tokens = self.whole(tokens)
        prefixes, known = self.prefixes(salt, tokens), self.known(salt, tokens)
        pages = self.new_pages(len(prefixes))
        assert self.tree.insert(tokens, pages, salt).pages == [self.pages[p] for p in known]
        self.pages |= {p: page for p, page in zip(prefixes, pages, strict=True) if p not in known}
        self.touch(prefixes)

    @precondition(lambda self: self.locks)
    @rule(which=pick, tokens=prompts, follow=st.booleans())
    def insert_after_a_lock(self, which: int, tokens: list[int], follow: bool) -> None:
        """As one does who computes on: the lock may then move to the new end."""
        at = which % len(self.locks)
        node, (salt, before) = self.locks[at]
        tokens = self.whole(tokens)
        after = (salt, before + tuple(tokens))
        prefixes = self.prefixes(*after)[len(before) // self.size :]
        known = [p for p in prefixes if p in self.pages]
        pages = self.new_pages(len(prefixes))
        end, _, there = self.tree.insert(tokens, pages, salt, after=node)
        assert there == [self.pages[p] for p in known]
        self.pages |= {p: page for p, page in zip(prefixes, pages, strict=True) if p not in known}
        self.touch(self.prefixes(*after))
        if end == node or follow:
            self.tree.lock(end)
            self.tree.unlock(node, used=False)
            self.locks[at] = (end, after)

    @rule(tokens=prompts, salt=salts)
    def lock(self, tokens: list[int], salt: str) -> None:
        match = self.tree.match(tokens, salt)
        before = len(self.tree)
        node = self.tree.cut(match)
        AgainstADictOfPrefixes.splits += len(self.tree) - before
        self.tree.lock(node)
        self.locks.append((node, (salt, tuple(tokens[: len(match.pages) * self.size]))))

    @precondition(lambda self: self.locks)
    @rule(which=pick, used=st.booleans())
    def unlock(self, which: int, used: bool) -> None:
        node, prefix = self.locks.pop(which % len(self.locks))
        self.tree.unlock(node, used)
        if used:
            self.touch(self.prefixes(*prefix))

    @precondition(lambda self: self.pages)
    @rule(count=st.integers(0, 5))
    def evict(self, count: int) -> None:
        """Of the prefixes that none continues and none has locked, the least recently used, again and again."""
        held = self.held()
        gone = set()
        for _ in range(count):
            continued = {(salt, tokens[: -self.size]) for salt, tokens in self.pages}
            candidates = [p for p in self.pages if p not in continued and p not in held]
            if candidates:
                oldest = min(candidates, key=lambda p: self.used[p])
                gone.add(self.pages.pop(oldest))
        evicted = self.tree.evict(count)
        assert len(evicted) == len(set(evicted))
        assert set(evicted) == gone
        AgainstADictOfPrefixes.evicted += len(gone)

    @precondition(lambda self: self.locks or self.pages)
    @rule(which=pick)
    def remove(self, which: int) -> None:
        unlocked = [branch for branch in self.tree.branches() if not branch.locks]
        if unlocked:
            branch = unlocked[which % len(unlocked)]
            first = next(p for p, page in self.pages.items() if page == branch.pages[0])
            below = {p for p in self.pages if p[0] == first[0] and p[1][: len(first[1])] == first[1]}
            assert sorted(self.tree.remove(branch.node)) == sorted(self.pages.pop(p) for p in below)

    @invariant()
    def agrees(self) -> None:
        AgainstADictOfPrefixes.rules_run += 1
        if not hasattr(self, "tree"):
            return
        self.tree.check()
        found: dict[Prefix, int] = {}
        path: list[tuple[str, tuple[int, ...]]] = [("", ())]
        for branch in self.tree.branches():
            del path[branch.depth :]
            salt, tokens = path[-1]
            salt = branch.salt if branch.depth == 1 else salt
            path.append((salt, tokens + tuple(branch.tokens)))
            prefixes = self.prefixes(*path[-1])[-len(branch.pages) :]
            found |= dict(zip(prefixes, branch.pages, strict=True))
        assert found == self.pages
        assert self.tree.num_pages == len(self.pages)
        assert self.tree.num_locked == len(self.held())
        for node, prefix in self.locks:
            there = [page for one in self.tree.path(node) for page in self.tree._nodes[one].pages]
            assert there == [self.pages[p] for p in self.prefixes(*prefix)]


def test_at_least_ten_thousand_rules_hold() -> None:
    """The promise is counted, not assumed: every rule is followed by every invariant."""
    machine = AgainstADictOfPrefixes
    machine.rules_run = machine.splits = machine.evicted = 0
    run_state_machine_as_test(machine, settings=settings(max_examples=260, stateful_step_count=60, derandomize=True))
    assert machine.rules_run >= 10_000
    assert machine.splits >= 150  # by locks alone; inserts split too
    assert machine.evicted >= 1000

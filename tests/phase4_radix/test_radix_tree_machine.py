"""The tree under every operation in any order, against a model without nodes."""

from collections.abc import Sequence

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

from phase4_radix.extras.invariants import check_tree
from phase4_radix.extras.nodes import nodes_of, path_to
from phase4_radix.radix_tree import RadixTree

Prefix = tuple[str, tuple[int, ...]]  # salt, tokens


class AgainstADictOfPrefixes(RuleBasedStateMachine):
    """The model is a dict from every known prefix, in whole pages, to the page where it ends. It has no nodes."""

    splits = evicted = 0
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

    def locked(self) -> set[Prefix]:
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
        found, wanted = self.tree.match(tokens, salt).pages, [self.pages[p] for p in self.known(salt, tokens)]
        assert found == wanted, f"{tokens} must match pages {wanted}, and matches {found}"

    @rule(tokens=prompts, salt=salts)
    def insert(self, tokens: list[int], salt: str) -> None:
        tokens = self.whole(tokens)
        prefixes, known = self.prefixes(salt, tokens), self.known(salt, tokens)
        pages = self.new_pages(len(prefixes))
        (_, cached), wanted = self.tree.insert(tokens, pages, salt), [self.pages[p] for p in known]
        assert cached == wanted, f"{tokens} inserted: the tree had pages {wanted}, and returns {cached}"
        self.pages |= {p: page for p, page in zip(prefixes, pages, strict=True) if p not in known}
        self.touch(prefixes)

    @precondition(lambda self: self.locks)
    @rule(which=pick, tokens=prompts, follow=st.booleans())
    def insert_after_a_lock(self, which: int, tokens: list[int], follow: bool) -> None:
        """As a running request does: its lock may then move to the new end."""
        at = which % len(self.locks)
        node, (salt, before) = self.locks[at]
        tokens = self.whole(tokens)
        after = (salt, before + tuple(tokens))
        prefixes = self.prefixes(*after)[len(before) // self.size :]
        known = [p for p in prefixes if p in self.pages]
        pages = self.new_pages(len(prefixes))
        end, cached = self.tree.insert(tokens, pages, salt, after=node)
        assert cached == [self.pages[p] for p in known]
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
        node = self.tree.split(match)
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
        """Repeatedly the least recently used prefix that is neither locked nor continued by another."""
        locked = self.locked()
        gone = set()
        for _ in range(count):
            continued = {(salt, tokens[: -self.size]) for salt, tokens in self.pages}
            candidates = [p for p in self.pages if p not in continued and p not in locked]
            if candidates:
                oldest = min(candidates, key=lambda p: self.used[p])
                gone.add(self.pages.pop(oldest))
        evicted = self.tree.evict(count)
        assert len(evicted) == len(set(evicted))
        assert set(evicted) == gone, f"evict({count}) must remove pages {sorted(gone)}, and removes {evicted}"
        AgainstADictOfPrefixes.evicted += len(gone)

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "tree"):
            return
        check_tree(self.tree)
        found: dict[Prefix, int] = {}
        path: list[tuple[str, tuple[int, ...]]] = [("", ())]
        for node in nodes_of(self.tree):
            del path[node.depth :]
            salt, tokens = path[-1]
            salt = node.salt if node.depth == 1 else salt
            path.append((salt, tokens + tuple(node.tokens)))
            prefixes = self.prefixes(*path[-1])[-len(node.pages) :]
            found |= dict(zip(prefixes, node.pages, strict=True))
        assert found == self.pages, f"the prefixes must be in pages {self.pages}"
        assert self.tree.num_pages == len(self.pages)
        assert self.tree.num_locked == len(self.locked())
        for node, prefix in self.locks:
            pages = [page for part in path_to(self.tree, node) for page in self.tree.nodes[part].pages]
            wanted = [self.pages[p] for p in self.prefixes(*prefix)]
            assert pages == wanted, f"a lock on pages {wanted} now covers {pages}"


@pytest.mark.parametrize("examples", [40, pytest.param(220, marks=pytest.mark.slow)])
def test_any_order_of_operations(examples: int) -> None:
    """Every rule is followed by every invariant. Splits and evictions are counted: there must be enough of them."""
    machine = AgainstADictOfPrefixes
    machine.splits = machine.evicted = 0
    run_state_machine_as_test(
        machine, settings=settings(max_examples=examples, stateful_step_count=60, derandomize=True)
    )
    assert min(machine.splits, machine.evicted) > examples // 4

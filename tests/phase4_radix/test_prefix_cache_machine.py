"""Requests admitted, computed, published, preempted and finished in any order, against the content of slots."""

import itertools
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

from phase0_request import FinishReason, Request, Slice
from phase1_kv_pool import OutOfPagesError, PageUsage
from phase4_radix.extras.block_hashes import BlockHashes, block_hashes
from phase4_radix.extras.invariants import check_cache
from phase4_radix.extras.nodes import nodes_of
from phase4_radix.prefix_cache import Counts, PrefixCache
from tests.phase4_radix.steps import named, resume

Content = tuple[str, tuple[int, ...]]  # of a slot: the salt and the prefix that it was computed for


class Router(BlockHashes):
    """Another process, which learns from the observer's calls what is cached: each block and the one before it."""

    def __init__(self, page_size: int) -> None:
        super().__init__(page_size)
        self.blocks: dict[int, int | None] = {}

    def stored(self, parent: int | None, pages: Sequence[int], tokens: Sequence[int], salt: str) -> list[int]:
        before = None if parent is None else self.by_page[parent]
        assert before is None or before in self.blocks, f"pages {pages} are stored before their parent {parent}"
        hashes = super().stored(parent, pages, tokens, salt)
        assert self.blocks.keys().isdisjoint(hashes), f"pages {pages} are stored twice"
        self.blocks |= zip(hashes, [before, *hashes], strict=False)
        return hashes

    def removed(self, pages: Sequence[int]) -> list[int]:
        hashes = super().removed(pages)
        for block in hashes:
            del self.blocks[block]
        orphans = {block for block, before in self.blocks.items() if before in hashes}
        assert not orphans, f"pages {pages} are removed before the blocks {orphans} behind them"
        return hashes

    def cached_tokens(self, request: Request) -> int:
        """What it may expect an engine to find of a request that has at least one token to compute."""
        hashes = block_hashes(request.tokens(0, request.total - 1), self.page_size, request.cache_salt)
        return self.page_size * len([*itertools.takewhile(self.blocks.__contains__, hashes)])


class AgainstTheContentOfSlots(RuleBasedStateMachine):
    """A model of the pool: each slot records the salt and prefix that it was written for. Every request must find in
    every slot of its table what it would have computed there itself."""

    seen = Counts()  # over all runs
    prompts = st.lists(st.integers(0, 1), min_size=1, max_size=9)
    pick = st.integers(0, 99)

    @initialize(pages=st.integers(3, 10), page_size=st.integers(1, 3))
    def start(self, pages: int, page_size: int) -> None:
        self.size, self.all_pages = page_size, range(pages)
        self.cache = PrefixCache(pages, page_size)
        self.router = Router(page_size)
        self.cache.observers.append(self.router)
        self.slots: dict[int, Content] = {}
        self.running: list[Request] = []
        self.preempted: list[Request] = []
        self.made = self.came = 0

    def in_tree(self) -> set[int]:
        return {page for node in nodes_of(self.cache.tree) for page in node.pages}

    def in_tables(self) -> set[int]:
        return {page for request in self.running for page in self.cache.table(request)}

    def published(self) -> dict[Content, int]:
        """The prefixes in the tree, by the content of their last slot."""
        pages = self.in_tree()
        ends = {self.slots[(page + 1) * self.size - 1]: page for page in pages}
        assert len(ends) == len(pages)  # no prefix twice
        return ends

    def prefixes(self, request: Request, stop: int) -> list[Content]:
        tokens = tuple(request.tokens(0, request.total))
        return [(request.cache_salt, tokens[:end]) for end in range(self.size, stop + 1, self.size)]

    def attach(self, request: Request) -> None:
        ends = self.published()
        known = [ends[p] for p in self.prefixes(request, request.total - 1) if p in ends]
        wanted, tokens = len(known) * self.size, self.cache.cached_tokens(request)
        assert tokens == wanted, f"of {request.total} tokens of {request.id} {wanted} are cached, found: {tokens}"
        assert self.router.cached_tokens(request) == wanted
        resume(self.cache, request)
        table = list(self.cache.table(request))
        assert table == known, f"{request.id} is attached with pages {table}; its cached prefix is in pages {known}"
        assert request.computed == len(known) * self.size
        self.running.append(request)
        self.came += 1

    @rule(prompt=prompts, salt=st.sampled_from(["", "", "", "s"]))
    def submit(self, prompt: list[int], salt: str) -> None:
        self.made += 1
        self.attach(Request(f"r{self.made}", tuple(prompt), cache_salt=salt))

    @precondition(lambda self: self.running)
    @rule(which=pick)
    def submit_again(self, which: int) -> None:
        """A prefix of a running request's prompt and answer."""
        model = self.running[which % len(self.running)]
        self.submit(model.tokens(0, model.total - which % model.total), model.cache_salt)

    @precondition(lambda self: self.preempted)
    @rule(which=pick)
    def resubmit(self, which: int) -> None:
        self.attach(self.preempted.pop(which % len(self.preempted)))

    @precondition(lambda self: self.running)
    @rule(lengths=st.lists(st.integers(0, 6), min_size=1, max_size=5), answer=st.integers(0, 1))
    def one_step(self, lengths: list[int], answer: int) -> None:
        self.step(lengths, answer)

    def step(self, lengths: list[int], answer: int) -> None:
        """A step of an engine: all requests compute, then publish. The last admitted is preempted first."""
        batch = list(zip(self.running, itertools.cycle(lengths), strict=False))
        for request, length in batch:
            while request in self.running and not self.compute(request, length):
                self.drop(self.running[-1], preempt=True)
        for request, length in batch:
            if length and request in self.running:
                self.publish(request)
                if request.computed == request.total:
                    request.append(answer, 0.0)

    @precondition(lambda self: self.running)
    @rule(steps=st.integers(2, 6), answer=st.integers(0, 1))
    def steps(self, steps: int, answer: int) -> None:
        for _ in range(steps):
            self.step([2], answer)

    @precondition(lambda self: self.running)
    @rule(which=pick, length=st.integers(1, 6))
    def compute_one(self, which: int, length: int) -> None:
        self.compute(self.running[which % len(self.running)], length)

    @precondition(lambda self: self.running)
    @rule(which=pick)
    def publish_one(self, which: int) -> None:
        self.publish(self.running[which % len(self.running)])

    def compute(self, request: Request, length: int) -> bool:
        """`grow` succeeds exactly if the free and the cached pages are enough."""
        part = Slice(request, request.computed, min(length, request.total - request.computed))
        missing = max(-(-part.stop // self.size) - len(self.cache.table(request)), 0)
        free = sum(self.cache.allocator.count(page) == 0 for page in self.all_pages)
        room = free + len(self.in_tree() - self.in_tables())
        fits = self.cache.can_grow(request, part.stop)
        assert fits == (missing <= room), f"{missing} pages missing, {room} free or evictable: can_grow says {fits}"
        before, evictions = self.cache.usage, self.cache.counts.evictions
        if missing > room:
            with pytest.raises(OutOfPagesError):
                self.cache.grow(request, part.stop)
            assert self.cache.usage == before, f"a grow that failed changed {before} to {self.cache.usage}"
            return False
        self.cache.grow(request, part.stop)
        assert self.cache.counts.evictions - evictions == max(missing - free, 0)
        if not part.length:
            return True
        others = {page for other in self.running if other is not request for page in self.cache.table(other)}
        tokens = tuple(request.tokens(0, part.stop))
        for position, slot in zip(range(part.start, part.stop), self.cache.slots(part), strict=True):
            page = slot // self.size
            assert page not in self.in_tree() | others, f"{request.id} writes to page {page}, which is shared"
            self.slots[slot] = request.cache_salt, tokens[: position + 1]
        request.advance(part.start, part.length)
        return True

    def publish(self, request: Request) -> None:
        """The tree then holds what it held before and every full page that the request has computed, no prefix twice.
        The table names the tree's pages, and after them its own."""
        before, table = self.published(), list(self.cache.table(request))
        full = self.prefixes(request, request.computed)
        self.cache.publish(request)
        after = self.published()
        assert after == dict(zip(full, table, strict=False)) | before
        wanted = [after[prefix] for prefix in full] + table[len(full) :]
        found = list(self.cache.table(request))
        assert found == wanted, f"{request.id} published pages of {table}: its table must be {wanted}, and is {found}"

    @precondition(lambda self: self.running)
    @rule(which=pick, preempt=st.booleans())
    def finish(self, which: int, preempt: bool) -> None:
        self.drop(self.running[which % len(self.running)], preempt)

    def drop(self, request: Request, preempt: bool) -> None:
        self.running.remove(request)
        if preempt:
            request.preempt()
            self.preempted.append(request)
        else:
            request.finish(FinishReason.ABORT, 0.0)
        before = self.in_tree()
        self.cache.release(request)
        assert self.in_tree() == before, f"{request.id} was released; cached pages {before} are now {self.in_tree()}"

    @precondition(lambda self: len(self.running) > 1 and self.cache.usage.cached)
    @rule()
    def reset(self) -> None:
        unused = self.in_tree() - self.in_tables()
        assert self.cache.reset() == len(unused)
        assert self.in_tree() <= self.in_tables()

    def teardown(self) -> None:
        if hasattr(self, "cache"):
            for name in Counts.__slots__:
                setattr(self.seen, name, getattr(self.seen, name) + getattr(self.cache.counts, name))

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "cache"):
            return
        check_cache(self.cache)
        assert self.router.blocks.keys() == {named(*content, self.size) for content in self.published()}
        assert len(self.cache.tree) <= 2 * self.came  # one where it diverges, and one where it ends
        cached, referenced = self.in_tree() - self.in_tables(), self.in_tables()
        free = {page for page in self.all_pages if self.cache.allocator.count(page) == 0}
        assert not free & (self.in_tree() | referenced)
        assert len(free) + len(cached) + len(referenced) == len(self.all_pages)
        assert self.cache.usage == PageUsage(len(self.all_pages), len(free), len(referenced), len(cached))
        for page in self.all_pages:
            tables = sum(page in self.cache.table(request) for request in self.running)
            count, in_tree = self.cache.allocator.count(page), page in self.in_tree()
            assert count == tables + in_tree, f"page {page}: {tables} tables, in the tree: {in_tree}, count {count}"
        for page in free:  # from now on its content counts as undefined
            for slot in range(page * self.size, (page + 1) * self.size):
                self.slots.pop(slot, None)
        for request in self.running:
            table, tokens = self.cache.table(request), tuple(request.tokens(0, request.total))
            for position in range(request.computed):
                slot = table[position // self.size] * self.size + position % self.size
                wanted, found = (request.cache_salt, tokens[: position + 1]), self.slots.get(slot)
                assert found == wanted, (
                    f"{request.id} reads slot {slot}, written for (salt, prefix) {found}, not {wanted}"
                )


@pytest.mark.parametrize("examples", [80, pytest.param(300, marks=pytest.mark.slow)])
def test_any_order_of_operations(examples: int) -> None:
    """Every rule is followed by every invariant. Hits, duplicates and evictions are counted: there must be enough."""
    AgainstTheContentOfSlots.seen = seen = Counts()
    run_state_machine_as_test(
        AgainstTheContentOfSlots, settings=settings(max_examples=examples, stateful_step_count=60, derandomize=True)
    )
    assert min(seen.hit_tokens, seen.duplicates, seen.evictions) > examples // 8

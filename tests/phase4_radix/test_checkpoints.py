"""A prefix cache with checkpoints finds a prefix only where the state after it was kept, and decides which are."""

from collections import deque
from typing import NamedTuple

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
from phase1_kv_pool.allocator import PageError
from phase1_kv_pool.extras.checkpoints import CheckpointedLayout, Copy
from phase1_kv_pool.layout import KVLayout
from phase4_radix.extras.checkpoints import CheckpointedPrefixCache
from phase4_radix.extras.invariants import check_cache
from phase4_radix.extras.nodes import nodes_of, path_to
from tests.phase4_radix.steps import SIZE, admit, finish, resume

Content = tuple[str, tuple[int, ...]]  # of a slot or a state: the salt and the tokens that it summarizes


def step(cache: CheckpointedPrefixCache, request: Request, length: int | None = None) -> list[Copy]:
    """A step of a request that is committed. Returns the copies that it makes."""
    part = Slice(request, request.computed, request.total - request.computed if length is None else length)
    cache.grow(request, part.stop)
    copies = cache.checkpoints.take(part)
    request.advance(part.start, part.length)
    cache.publish(request)
    check_cache(cache)
    return copies


def serve(
    cache: CheckpointedPrefixCache, name: str, prompt: range | list[int], answer: int = 0, chunk: int = 99
) -> int:
    """Serve a request alone. Returns how many of its tokens were found."""
    request = admit(cache, name, prompt)
    found = request.computed
    if found:
        cache.checkpoints.use(cache.table(request)[-1])  # as the runner does
    while request.computed < request.total:
        step(cache, request, min(chunk, request.total - request.computed))
        if request.computed == request.total and len(request.output_tokens) < answer:
            request.append(100 + len(request.output_tokens), 0.0)
    finish(cache, request)
    check_cache(cache)
    return found


def test_the_same_prompt_is_found_up_to_its_last_page_that_leaves_a_token() -> None:
    cache = CheckpointedPrefixCache(4, 64, SIZE)
    assert [serve(cache, f"{number}", range(16)) for number in range(2)] == [0, 12]
    assert [serve(cache, f"+{number}", range(18)) for number in range(2)] == [12, 16]


def test_the_next_turn_of_a_chat_finds_the_prompt_and_the_answer() -> None:
    """The checkpoint of an answer moves along with it: at any time it takes one slot."""
    cache = CheckpointedPrefixCache(3, 64, SIZE)
    request = admit(cache, "first", range(10))
    while len(request.output_tokens) < 23:
        step(cache, request)
        request.append(len(request.output_tokens), 0.0)
        assert len(cache.checkpoints.kept) == 1, "the end of the prompt is passed once the answer goes on"
    finish(cache, request)
    said = request.tokens(0, request.total)
    assert serve(cache, "again", [*range(10), 50, 51, 52]) == 8, "without the answer, up to the end of the prompt"
    assert serve(cache, "next", [*said, 50, 51]) == 32


def test_prompts_that_branch_off_alike_are_found_from_the_third_on() -> None:
    """The first shows nothing, the second shows where the first and it have parted, and has its state copied there."""
    cache = CheckpointedPrefixCache(8, 64, SIZE)
    system = [*range(21)]
    assert [serve(cache, f"{n}", [*system, *range(100 * n, 100 * n + 30)]) for n in range(1, 5)] == [0, 0, 20, 20]


def test_a_prompt_that_another_waits_for_is_copied_where_they_part() -> None:
    cache = CheckpointedPrefixCache(8, 64, SIZE)
    request = admit(cache, "first", range(40))
    cache.awaited(request, 24)
    assert [copy.tokens for copy in step(cache, request)] == [24, 36]
    assert admit(cache, "other", [*range(25), 99]).computed == 24


def test_the_chunks_of_a_long_prompt_take_no_slots_from_what_is_used() -> None:
    """They take free slots, and each other's. A request that uses one keeps it."""
    cache = CheckpointedPrefixCache(3, 256, SIZE)
    for first in (0, 1):
        serve(cache, f"short {first}", [first, *range(8)])
    serve(cache, "long", range(1000, 1200), chunk=16)
    assert serve(cache, "a", [0, *range(8), 0]) == 8
    assert serve(cache, "b", [1, *range(8), 0]) == 8
    assert not cache.checkpoints.passed, "its end has taken the slot of the last of its chunks"
    cache = CheckpointedPrefixCache(6, 256, SIZE)
    serve(cache, "long", range(1000, 1200), chunk=16)
    assert serve(cache, "like it", [*range(1000, 1187), 3]) == 176, "the last end of a chunk that both have"
    serve(cache, "other", range(2000, 2200), chunk=16)
    assert serve(cache, "again", [*range(1000, 1178), 4]) == 176


def test_the_least_recently_used_checkpoint_gives_its_slot_away_and_stays_a_page() -> None:
    cache = CheckpointedPrefixCache(2, 64, SIZE)
    for first in (0, 1, 0, 2):
        serve(cache, f"{first} {cache.counts.queries}", [first, *range(8)])
    assert cache.usage.cached == 6, "pages are evicted only when pages are needed"
    found = [cache.cached_tokens(Request(f"{first}", (first, *range(8), 0))) for first in range(3)]
    assert found == [8, 0, 8]


def test_a_checkpoint_leaves_with_its_page() -> None:
    cache = CheckpointedPrefixCache(4, 4, SIZE)
    serve(cache, "a", range(9))
    serve(cache, "b", range(50, 66))
    assert cache.cached_tokens(Request("a again", tuple(range(9)))) == 0
    assert len(cache.checkpoints.free) == 3
    cache.reset()
    assert len(cache.checkpoints.free) == 4
    check_cache(cache)


def test_prompts_under_another_salt_find_no_state() -> None:
    cache = CheckpointedPrefixCache(4, 64, SIZE)
    serve(cache, "a", range(17))
    assert cache.cached_tokens(Request("b", tuple(range(17)))) == 16
    assert cache.cached_tokens(Request("c", tuple(range(17)), cache_salt="tenant")) == 0


def test_a_step_that_is_not_committed_leaves_no_checkpoint() -> None:
    """The slice is planned again with another length. Nothing of the first plan is found."""
    cache = CheckpointedPrefixCache(4, 64, SIZE)
    request = admit(cache, "a", range(30))
    cache.grow(request, 30)
    assert [copy.tokens for copy in cache.checkpoints.take(Slice(request, 0, 13))] == [12]
    assert [copy.tokens for copy in cache.checkpoints.take(Slice(request, 0, 9))] == [8]
    request.advance(0, 9)
    cache.publish(request)
    assert [copy.tokens for copy in cache.checkpoints.take(Slice(request, 9, 8))] == [16]
    request.advance(9, 8)
    cache.publish(request)
    assert len(cache.checkpoints.passed | cache.checkpoints.kept) == 2
    finish(cache, request)
    check_cache(cache)
    assert cache.cached_tokens(Request("b", (*range(15), 0))) == 8


def test_a_checkpoint_of_a_step_in_flight_waits_for_its_commit() -> None:
    """Two chunks are in flight; the first is committed."""
    cache = CheckpointedPrefixCache(4, 64, SIZE)
    request = admit(cache, "a", range(30))
    cache.grow(request, 30)
    for start in (0, 8):
        cache.checkpoints.take(Slice(request, start, 8))
    request.advance(0, 8)
    cache.publish(request)
    check_cache(cache)
    assert cache.cached_tokens(Request("b", tuple(range(30)))) == 8
    request.advance(8, 8)
    cache.publish(request)
    assert cache.cached_tokens(Request("b", tuple(range(30)))) == 16


def test_a_checkpoint_that_is_lost_after_it_was_found_leaves_the_one_before_it() -> None:
    """Between its admission and its first slice. The tokens after that are computed again, and nothing is stored in
    published pages."""
    cache = CheckpointedPrefixCache(2, 64, SIZE)
    serve(cache, "a", range(20), chunk=8)
    request = admit(cache, "b", [*range(18), 3])
    assert request.computed == 16
    table = cache.table(request)
    assert cache.checkpoints.usable(table) == 4
    cache.checkpoints.removed([table[3]])
    assert cache.checkpoints.usable(table) == 2
    cache.grow(request, 19)
    assert cache.slots(Slice(request, 8, 8)) == [-1] * 8
    assert cache.slots(Slice(request, 14, 4)) == [-1, -1, table[4] * SIZE, table[4] * SIZE + 1]


def test_a_tenth_of_the_memory_of_pages_is_for_checkpoints() -> None:
    """Whatever a state takes: it is never what pages are evicted for."""
    pages = KVLayout(6, 8, 64, 16)
    for state_bytes in (1 << 10, 1 << 20):
        layout = CheckpointedLayout.of(pages, state_bytes)
        count = layout.pages_in(1 << 30)
        used = count * pages.bytes_per_page, layout.slots_for(count) * state_bytes
        assert sum(used) <= 1 << 30
        assert used[0] >= 0.9 * (1 << 30)
        assert used[1] >= 0.08 * (1 << 30)
    large = CheckpointedLayout.of(pages, 1 << 28)  # more than a tenth: the pages have the rest
    count = large.pages_in(1 << 30)
    assert large.slots_for(count) == 1
    assert count == (3 << 28) // pages.bytes_per_page
    assert large.pages_in(1 << 27) == 0


def test_a_check_names_slots_that_are_lost_and_pages_that_are_gone() -> None:
    cache = CheckpointedPrefixCache(2, 8, SIZE)
    serve(cache, "a", range(9))
    slot = cache.checkpoints.free.pop()
    with pytest.raises(PageError, match="2 slots"):
        check_cache(cache)
    cache.checkpoints.kept[7] = slot
    with pytest.raises(PageError, match="7"):
        check_cache(cache)


class Flight(NamedTuple):
    part: Slice
    copies: list[Copy]


class AgainstTheContentOfSlots(RuleBasedStateMachine):
    """A model of the device: what the state of each request, and each slot, summarizes. Up to two slices of a request
    are in flight; they are committed in order, or lost, and then nothing that they wrote counts."""

    found = 0  # over all runs
    prompts = st.lists(st.integers(0, 1), min_size=1, max_size=20)
    pick = st.integers(0, 99)

    @initialize(pages=st.integers(4, 12), page_size=st.integers(1, 4), slots=st.integers(1, 5))
    def start(self, pages: int, page_size: int, slots: int) -> None:
        self.size = page_size
        self.cache = CheckpointedPrefixCache(slots, pages, page_size)
        self.slots: dict[int, Content | None] = {}
        self.states: dict[str, tuple[list[int], int]] = {}  # by request: its table, and how many tokens
        self.flights: deque[Flight] = deque()
        self.running: list[Request] = []
        self.preempted: list[Request] = []
        self.made = 0

    def content(self, request: Request, tokens: int) -> Content:
        return request.cache_salt, tuple(request.tokens(0, tokens))

    def in_flight(self, request: Request) -> int:
        return sum(flight.part.length for flight in self.flights if flight.part.request is request)

    @rule(prompt=prompts, salt=st.sampled_from(["", "", "", "s"]))
    def submit(self, prompt: list[int], salt: str) -> None:
        self.made += 1
        self.attach(Request(f"r{self.made}", tuple(prompt), cache_salt=salt))

    @precondition(lambda self: self.running)
    @rule(which=pick, more=prompts)
    def go_on(self, which: int, more: list[int]) -> None:
        """What a running request has so far, or a part of it, and then more."""
        model = self.running[which % len(self.running)]
        self.submit([*model.tokens(0, model.total - which % model.total), *more], model.cache_salt)

    @precondition(lambda self: self.preempted)
    @rule(which=pick)
    def resubmit(self, which: int) -> None:
        self.attach(self.preempted.pop(which % len(self.preempted)))

    def attach(self, request: Request) -> None:
        wanted = self.cache.cached_tokens(request)
        resume(self.cache, request)
        assert request.computed == wanted
        if wanted:
            slot = self.cache.checkpoints.kept | self.cache.checkpoints.passed
            assert self.slots[slot[self.cache.table(request)[-1]]] == self.content(request, wanted)
            type(self).found += 1
        self.running.append(request)

    @precondition(lambda self: self.running)
    @rule(which=pick, length=st.integers(1, 9))
    def launch(self, which: int, length: int) -> None:
        """A slice, as the runner packs it."""
        request = self.running[which % len(self.running)]
        start = request.computed + self.in_flight(request)
        length = min(length, request.total - start)
        if not length or not self.cache.can_grow(request, start + length):
            return
        part = Slice(request, start, length)
        self.cache.grow(request, part.stop)
        table, checkpoints = self.cache.table(request), self.cache.checkpoints
        held, tokens = self.states.get(request.id, (None, 0))
        if start and (held is not table or tokens != start):
            pages = checkpoints.usable(table[: start // self.size])
            if pages:
                slot = checkpoints.use(table[pages - 1])
                assert self.slots[slot] == self.content(request, pages * self.size)
        self.states[request.id] = table, part.stop
        copies = checkpoints.take(part)
        for copy in copies:
            self.slots[copy.slot] = self.content(request, copy.tokens)
        self.flights.append(Flight(part, copies))

    @precondition(lambda self: self.flights)
    @rule(answer=st.integers(0, 1))
    def commit(self, answer: int) -> None:
        (request, start, length, _), _ = self.flights.popleft()
        if request not in self.running:
            return
        request.advance(start, length)
        self.cache.publish(request)
        if request.computed == request.total:
            request.append(answer, 0.0)

    @precondition(lambda self: self.running)
    @rule(length=st.integers(1, 9), steps=st.integers(1, 5), ahead=st.integers(0, 1), answer=st.integers(0, 1))
    def run(self, length: int, steps: int, ahead: int, answer: int) -> None:
        for _ in range(steps):
            for number in range(len(self.running)):
                self.launch(number, length)
            while len(self.flights) > ahead * len(self.running):
                self.commit(answer)

    @precondition(lambda self: self.flights)
    @rule()
    def lose(self) -> None:
        """A step has failed: what it wrote is anything, also what it wrote to slots."""
        for flight in self.flights:
            self.states.pop(flight.part.request.id, None)
            for copy in flight.copies:
                self.slots[copy.slot] = None
        self.flights.clear()

    @precondition(lambda self: self.running)
    @rule(which=pick, preempt=st.booleans())
    def leave(self, which: int, preempt: bool) -> None:
        request = self.running[which % len(self.running)]
        if self.in_flight(request):
            return
        self.running.remove(request)
        if preempt:
            request.preempt()
            self.preempted.append(request)
        else:
            request.finish(FinishReason.ABORT, 0.0)
        self.cache.release(request)

    @precondition(lambda self: self.made > 3)
    @rule()
    def reset(self) -> None:
        self.cache.reset()

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "cache"):
            return
        check_cache(self.cache)
        nodes = {view.node: view for view in nodes_of(self.cache.tree)}
        for page, slot in (self.cache.checkpoints.kept | self.cache.checkpoints.passed).items():
            (view,) = [view for view in nodes.values() if page in view.pages]
            *before, _ = path = [nodes[node] for node in path_to(self.cache.tree, view.node)]
            tokens = [token for each in before for token in each.tokens]
            tokens += view.tokens[: (view.pages.index(page) + 1) * self.size]
            assert self.slots[slot] == (path[0].salt, tuple(tokens))


@pytest.mark.parametrize("examples", [100, pytest.param(600, marks=pytest.mark.slow)])
def test_a_checkpoint_is_the_state_after_its_page_in_any_order_of_operations(examples: int) -> None:
    AgainstTheContentOfSlots.found = 0
    run_state_machine_as_test(
        AgainstTheContentOfSlots, settings=settings(max_examples=examples, stateful_step_count=50, derandomize=True)
    )
    assert AgainstTheContentOfSlots.found > examples // 4

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from phase1_kv_pool import OutOfPagesError, PageAllocator, PageError
from phase1_kv_pool.extras.invariants import check_allocator
from tests.phase0_request.support import refused


@pytest.mark.proof
def test_allocate_returns_all_pages_or_none() -> None:
    allocator = PageAllocator(4)
    assert (first := allocator.allocate(3)) == [0, 1, 2], f"the top of the stack is page 0, allocated: {first}"
    refused(OutOfPagesError, "2 pages wanted, 1 free", allocator.allocate, 2)
    assert allocator.num_free == 1, "an allocation that failed took pages"
    assert (none := allocator.allocate(0)) == [], f"an allocation of no pages returned {none}"
    assert (last := allocator.allocate(1)) == [3], f"only page 3 is free, allocated: {last}"
    assert (allocator.num_free, allocator.num_used) == (0, 4), "all four pages are in use"


def test_pages_freed_together_are_allocated_in_the_same_order() -> None:
    allocator = PageAllocator(12)
    first, _ = allocator.allocate(5), allocator.allocate(4)
    allocator.release(first)
    again = allocator.allocate(5)
    assert again == first == [0, 1, 2, 3, 4], f"pages {first} were freed, and come back as {again}"
    allocator.share([0])
    allocator.release([0, 1, 0])
    again = allocator.allocate(2)
    assert again == [0, 1], f"pages 0, 1, 0 were released, and come back as {again}"


def test_misuse_raises_an_error_with_the_page_and_changes_nothing() -> None:
    allocator = PageAllocator(4)
    allocator.allocate(3)
    allocator.release([1])
    before = [allocator.count(page) for page in range(4)], allocator.num_free
    for act, value, message in (
        (allocator.release, [0, 1], "page 1 is free already"),
        (allocator.release, [0, 0], "page 0 is free already"),
        (allocator.release, [2, 4], "page 4 is not of this pool; its pages run from 0 to 3"),
        (allocator.release, [2, -1], "page -1 is not of this pool"),
        (allocator.share, [0, 1], "page 1 is free; only a page in use"),
        (allocator.share, [0, -1], "page -1 is not of this pool"),
        (allocator.count, 7, "page 7 is not of this pool"),
    ):
        refused(PageError, message, act, value)
        after = [allocator.count(page) for page in range(4)], allocator.num_free
        assert after == before, f"a call with {value} raised, and left counts and free pages {after}, before: {before}"
    refused(ValueError, "cannot allocate -1 pages", allocator.allocate, -1)


class Unsearched(list[int]):
    """A list that may be indexed, sliced and extended, but not walked."""

    def refuse(self, *_: object) -> None:
        pytest.fail("an operation walks over all pages of the pool")

    __contains__ = __iter__ = __reversed__ = index = count = remove = copy = refuse  # type: ignore[assignment]


def test_no_operation_walks_the_pool() -> None:
    allocator = PageAllocator(20)
    allocator.free, allocator.counts = Unsearched(allocator.free), Unsearched(allocator.counts)
    pages = allocator.allocate(8)
    allocator.share(pages[:4])
    freed = allocator.release(pages), allocator.release(pages[:4])
    assert freed == (4, 4), f"8 pages, 4 of them shared, were released, then these 4: {freed} were freed"
    assert (allocator.count(3), allocator.num_free, allocator.num_used) == (0, 20, 0)
    refused(PageError, "page 3 is free already", allocator.release, [3])


@pytest.mark.parametrize("size", [0, 1.5])
def test_a_pool_has_at_least_one_page(size: object) -> None:
    with pytest.raises(ValueError, match="num_pages must be an integer from 1"):
        PageAllocator(size)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("counts", "free", "message"),
    [
        ([0, 0], [1, 0, 0], "twice"),
        ([1, 0], [1, 0], "page 0 has 1 users and is free"),
        ([0, 1], [], "page 0 has 0 users and is not free"),
        ([0, 0], [0, 1, 2], "foreign"),
    ],
)
def test_check_finds_every_inconsistency(counts: list[int], free: list[int], message: str) -> None:
    allocator = PageAllocator(2)
    allocator.counts, allocator.free = counts, free
    with pytest.raises(PageError, match=message):
        check_allocator(allocator)


class AllocatorAgainstCounter(RuleBasedStateMachine):
    """The model is a Counter of references. Any order of allocations, shares, releases and misuse."""

    @initialize(size=st.integers(1, 12))
    def start(self, size: int) -> None:
        self.size = size
        self.allocator = PageAllocator(size)
        self.references: Counter[int] = Counter()

    def free(self) -> set[int]:
        return {page for page in range(self.size) if not self.references[page]}

    @rule(n=st.integers(0, 6))
    def allocate(self, n: int) -> None:
        free = self.free()
        if n > len(free):
            refused(OutOfPagesError, f"{n} pages wanted", self.allocator.allocate, n)
            return
        pages = self.allocator.allocate(n)
        assert len(pages) == len(set(pages)) == n, f"allocate({n}) returned {pages}"
        assert set(pages) <= free, f"pages {sorted(set(pages) - free)} were allocated while in use"
        self.references.update(pages)

    @rule(pages=st.lists(st.integers(-1, 12), max_size=6))
    def share(self, pages: list[int]) -> None:
        if all(0 <= page < self.size and self.references[page] for page in pages):
            self.allocator.share(pages)
            self.references.update(pages)
            return
        refused(PageError, "page", self.allocator.share, pages)

    @rule(pages=st.lists(st.integers(-1, 12), max_size=6))
    def release(self, pages: list[int]) -> None:
        """Any pages, in use or not. Legal exactly if the model holds each of these references."""
        taken = Counter(pages)
        if all(0 <= page < self.size and taken[page] <= self.references[page] for page in taken):
            before = self.free()
            freed = self.allocator.release(pages)
            self.references -= taken
            became = sorted(self.free() - before)
            assert freed == len(became), f"release({pages}) freed {became} and returned {freed}"
            return
        refused(PageError, "page", self.allocator.release, pages)

    @rule(data=st.data())
    def release_a_reference(self, data: st.DataObject) -> None:
        pages = sorted(self.references.elements())
        if pages:
            page = data.draw(st.sampled_from(pages))
            self.allocator.release([page])
            self.references -= Counter([page])

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "allocator"):
            return
        check_allocator(self.allocator)
        counts = [self.allocator.count(page) for page in range(self.size)]
        wanted = [self.references[page] for page in range(self.size)]
        assert counts == wanted, f"the reference counts of pages 0 to {self.size - 1} are {counts}, not {wanted}"
        free = self.allocator.num_free
        assert free == len(self.free()), f"{free} pages are on the stack, and {len(self.free())} have no reference"


AllocatorAgainstCounter.TestCase.settings = settings(max_examples=80, stateful_step_count=40)
TestAllocatorAgainstCounter = AllocatorAgainstCounter.TestCase

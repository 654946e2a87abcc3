import itertools
from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from phase0_request import QueueFullError, Request, RequestQueue
from phase0_request.queue import SequenceState
from tests.phase0_request.support import refused


def names(queue: RequestQueue) -> list[str]:
    return [entry.request.id for entry in queue]


@pytest.fixture
def make_entry(make_request: Callable[..., Request]) -> Callable[..., SequenceState]:
    numbers = itertools.count()
    return lambda rank=0: SequenceState(make_request(), (rank, next(numbers)))


@pytest.mark.proof
def test_first_in_first_out_within_a_rank(make_entry: Callable[..., SequenceState]) -> None:
    queue = RequestQueue()
    for rank in (5, 0, 5, -1, 0):
        queue.add(make_entry(rank))
    assert names(queue) == ["r4", "r2", "r5", "r1", "r3"], f"ranks 5 0 5 -1 0 of r1 to r5, in the queue: {names(queue)}"
    assert [queue.pop().request.id for _ in range(5)] == ["r4", "r2", "r5", "r1", "r3"]
    with pytest.raises(IndexError, match="pop from empty list"):
        queue.pop()


def test_a_request_at_the_limit_is_refused_and_nothing_changes(make_entry: Callable[..., SequenceState]) -> None:
    queue = RequestQueue(limit=2)
    queue.add(make_entry())
    queue.add(make_entry())
    refused(QueueFullError, "2 requests are already waiting", queue.add, make_entry(-1))
    assert names(queue) == ["r1", "r2"], f"limit 2, and a third was refused: {names(queue)} wait"
    queue.pop()
    queue.add(make_entry())
    assert names(queue) == ["r2", "r4"]
    with pytest.raises(ValueError, match="limit must be at least 1"):
        RequestQueue(limit=0)


def test_only_a_request_that_is_queued_can_be_removed(make_entry: Callable[..., SequenceState]) -> None:
    """One that ranks before all, one after all, and another one with the key of one that is queued."""
    queue = RequestQueue()
    entry = make_entry()
    queue.add(entry)
    for stranger in (make_entry(-1), make_entry(1), SequenceState(Request("same key", (1,)), entry.key)):
        refused(ValueError, f"request {stranger.request.id} is not in this queue", queue.remove, stranger)
    assert names(queue) == ["r1"], f"only strangers were removed, and {names(queue)} wait"
    queue.remove(entry)
    refused(ValueError, "request r1 is not in this queue", queue.remove, entry)


class Counted(int):
    """A rank that counts how often it is compared."""

    comparisons = 0

    def __lt__(self, other: object) -> bool:
        Counted.comparisons += 1
        return int.__lt__(self, other)  # type: ignore[operator]

    __hash__ = int.__hash__

    def __eq__(self, other: object) -> bool:
        Counted.comparisons += 1
        return int.__eq__(self, other)


def test_no_operation_searches_the_whole_queue(make_request: Callable[..., Request]) -> None:
    """Counted in comparisons, not seconds: among 4,096 requests, adding or removing one compares some dozens."""
    queue, request = RequestQueue(), make_request()
    entries = [SequenceState(request, (Counted(n * 2654435761 % 4096), n)) for n in range(4096)]
    for entry in entries:
        queue.add(entry)
    Counted.comparisons = 0
    for entry in entries[::40]:
        queue.remove(entry)
        queue.add(entry)
    operations = 2 * len(entries[::40])
    allowed = operations * 3 * 13  # log2(4096) is 12; a key is compared by == and then by <
    assert 0 < Counted.comparisons <= allowed, f"{operations} operations compare {Counted.comparisons} keys"


class AgainstASortedList(RuleBasedStateMachine):
    """The model is a plain list, sorted again after every change."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = RequestQueue()
        self.model: list[SequenceState] = []
        self.made = 0

    @rule(rank=st.integers(-2, 2))
    def add(self, rank: int) -> None:
        self.made += 1
        entry = SequenceState(Request(f"r{self.made}", (1,)), (rank, self.made))
        self.queue.add(entry)
        self.model.append(entry)
        self.model.sort(key=lambda e: e.key)

    @rule()
    def pop(self) -> None:
        if self.model:
            assert self.queue.pop() is self.model.pop(0)

    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        if self.model:
            self.queue.remove(self.model.pop(data.draw(st.integers(0, len(self.model) - 1))))

    @invariant()
    def same(self) -> None:
        wanted = [entry.request.id for entry in self.model]
        assert list(self.queue) == self.model, f"waiting must be {wanted}, are {names(self.queue)}"
        assert len(self.queue) == len(self.model)


AgainstASortedList.TestCase.settings = settings(max_examples=50, stateful_step_count=50)
TestAgainstASortedList = AgainstASortedList.TestCase

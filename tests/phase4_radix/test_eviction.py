"""The eviction queue against a dict of times."""

import random
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from phase4_radix.eviction import SLACK, EvictionQueue


def test_an_empty_queue_has_no_oldest() -> None:
    queue = EvictionQueue()
    queue.add(3, 1)
    queue.discard(3)
    queue.discard(3)
    with pytest.raises(IndexError):
        queue.oldest()


class Counted(dict[int, int]):
    """A dict that counts how often all of it is walked."""

    walks = 0

    def __iter__(self) -> Iterator[int]:
        self.walks += 1
        return super().__iter__()

    def values(self) -> Any:
        self.walks += 1
        return super().values()

    def items(self) -> Any:
        self.walks += 1
        return super().items()

    keys = __iter__


@pytest.mark.parametrize("late", [False, True])
def test_no_operation_searches_the_queue(late: bool) -> None:
    """Thousands of uses and evictions walk over all entries only now and then, to drop the stale ones."""
    queue = EvictionQueue()
    queue._entries = Counted()
    times = random.Random(0).sample(range(4000), 4000) if late else range(4000)
    for number, time in enumerate(times):
        queue.add(number % 1000, time)
    for _ in range(500):
        queue.discard(queue.oldest())
    walks = queue._entries.walks
    assert walks < 40, f"4,000 uses and 500 evictions walk {walks} times over a queue of 1,000 leaves"


@pytest.mark.parametrize("late", [False, True])
def test_oldest_is_right_across_rebuilds(late: bool) -> None:
    """Far more uses than nodes, so stale entries are dropped many times, and never outgrow the queue."""
    queue, rng, times = EvictionQueue(), random.Random(0), dict[int, int]()
    for number, time in enumerate(rng.sample(range(3000), 3000) if late else range(3000)):
        node = rng.randrange(20)
        queue.add(node, time)
        times[node] = time
        entries = len(queue._heap)
        assert entries <= 2 * len(queue) + SLACK, f"{entries} entries for {len(queue)} leaves, after {number + 1} uses"
        if number % 10 == 0:
            oldest = min(times, key=lambda node: times[node])
            assert queue.oldest() == oldest, f"after {number + 1} uses the oldest of {times} is {oldest}"


class AgainstADict(RuleBasedStateMachine):
    """The model is a dict of times; its oldest node is found by a search."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = EvictionQueue()
        self.times: dict[int, int] = {}

    @rule(node=st.integers(0, 9), time=st.integers(0, 40))
    def add(self, node: int, time: int) -> None:
        if time not in self.times.values():
            self.queue.add(node, time)
            self.times[node] = time

    @rule(node=st.integers(0, 9))
    def discard(self, node: int) -> None:
        self.queue.discard(node)
        self.times.pop(node, None)

    @rule()
    def evict(self) -> None:
        if self.times:
            self.queue.discard(self.queue.oldest())
            del self.times[min(self.times, key=lambda node: self.times[node])]

    @invariant()
    def agrees(self) -> None:
        assert self.queue.items() == set(self.times.items())
        assert len(self.queue) == len(self.times)
        if self.times:
            oldest = min(self.times, key=lambda node: self.times[node])
            assert self.queue.oldest() == oldest, f"the least recently used of {self.times} (node: time) is {oldest}"


AgainstADict.TestCase.settings = settings(max_examples=60, stateful_step_count=40)
TestAgainstADict = AgainstADict.TestCase

import heapq
from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from phase0_request import QueueFullError, Request, RequestQueue


def names(queue: RequestQueue) -> list[str]:
    return [request.id for request in queue]


@pytest.mark.proof
def test_first_in_first_out_within_a_priority(make_request: Callable[..., Request]) -> None:
    queue = RequestQueue()
    for priority in (5, 0, 5, -1, 0):
        queue.push(make_request(priority=priority))
    assert names(queue) == ["r4", "r2", "r5", "r1", "r3"]
    assert [queue.pop().id for _ in range(5)] == ["r4", "r2", "r5", "r1", "r3"]
    with pytest.raises(IndexError, match="empty queue"):
        queue.pop()


def test_a_preempted_request_comes_back_to_the_front_of_its_priority(make_request: Callable[..., Request]) -> None:
    queue = RequestQueue()
    first, second, urgent = make_request(), make_request(), make_request(priority=-1)
    for request in (first, second, urgent):
        queue.push(request)
    back, again = make_request(), make_request()
    queue.push_front(back)
    queue.push_front(again)
    assert names(queue) == [urgent.id, again.id, back.id, first.id, second.id]


def test_past_its_limit_it_refuses_and_keeps_what_it_has(make_request: Callable[..., Request]) -> None:
    queue = RequestQueue(limit=2)
    queue.push(make_request())
    queue.push(make_request())
    with pytest.raises(QueueFullError, match="2 requests wait already"):
        queue.push(make_request())
    assert names(queue) == ["r1", "r2"]
    queue.push_front(make_request())  # was admitted once already
    assert names(queue) == ["r4", "r1", "r2"]
    with pytest.raises(ValueError, match="limit must be at least 1"):
        RequestQueue(limit=0)


def test_one_request_cannot_wait_twice(make_request: Callable[..., Request]) -> None:
    queue = RequestQueue()
    request = make_request()
    queue.push(request)
    for push in (queue.push, queue.push_front):
        with pytest.raises(ValueError, match="in the queue already"):
            push(request)
    assert names(queue) == [request.id]


def test_those_who_leave_leave_no_trace_in_memory(make_request: Callable[..., Request]) -> None:
    """A storm of arrivals that hang up, behind one who waits: what is kept stays bounded by who is there."""
    queue = RequestQueue()
    queue.push(make_request())
    for _ in range(5_000):
        request = make_request(priority=1)
        queue.push(request)
        assert queue.remove(request)
        assert not queue.remove(request)
        assert len(queue._heap) <= 2 * len(queue) + 9
    assert names(queue) == ["r1"]


def test_no_operation_walks_the_queue(make_request: Callable[..., Request], monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted in comparisons, not seconds: with 4,096 waiting, a push and a pop look at some dozens of entries."""
    looks = 0

    class Counted(tuple):  # type: ignore[type-arg]
        __slots__ = ()

        def __lt__(self, other: object) -> bool:
            nonlocal looks
            looks += 1
            return tuple.__lt__(self, other)  # type: ignore[operator]

    push = heapq.heappush
    monkeypatch.setattr(heapq, "heappush", lambda heap, entry: push(heap, Counted(entry)))
    queue = RequestQueue()
    for n in range(4096):
        queue.push(make_request(priority=n * 2654435761 % 64))
    looks = 0
    for n in range(100):
        queue.push(make_request(priority=n % 64))
        queue.pop()
    assert 0 < looks <= 100 * 3 * 13  # a push looks at up to log2(n) entries, a pop at up to twice as many


class AgainstASortedList(RuleBasedStateMachine):
    """The model is a plain list kept in order by brute force."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = RequestQueue()
        self.model: list[Request] = []
        self.made = 0
        self.gone: list[str] = []

    def make(self, priority: int) -> Request:
        """A new request, by its own id or by one that has left: a forgotten entry must not come back to life."""
        if self.gone and self.made % 2:
            self.made += 1
            return Request(self.gone.pop(), (1,), priority=priority)
        self.made += 1
        return Request(f"r{self.made}", (1,), priority=priority)

    @rule(priority=st.integers(-2, 2))
    def push(self, priority: int) -> None:
        request = self.make(priority)
        self.queue.push(request)
        self.model.append(request)
        self.model.sort(key=lambda r: r.priority)

    @rule(priority=st.integers(-2, 2))
    def push_front(self, priority: int) -> None:
        request = self.make(priority)
        self.queue.push_front(request)
        self.model.insert(0, request)
        self.model.sort(key=lambda r: r.priority)

    @rule()
    def pop(self) -> None:
        assert self.queue.peek() is (self.model[0] if self.model else None)
        if self.model:
            assert self.queue.pop() is self.model.pop(0)

    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        if self.model:
            request = self.model.pop(data.draw(st.integers(0, len(self.model) - 1)))
            assert request in self.queue
            assert self.queue.remove(request)
            assert request not in self.queue
            self.gone.append(request.id)

    @rule()
    def remove_a_stranger(self) -> None:
        assert not self.queue.remove(Request("stranger", (1,)))

    @invariant()
    def same(self) -> None:
        assert list(self.queue) == self.model
        assert len(self.queue) == len(self.model)


AgainstASortedList.TestCase.settings = settings(max_examples=100, stateful_step_count=50)
TestAgainstASortedList = AgainstASortedList.TestCase

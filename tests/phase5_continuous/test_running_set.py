"""The running set by itself: allocate, append a page, preempt, and flush what was in flight."""

import pytest

from phase0_request import Request, RequestState
from phase1_kv_pool import PagedCache
from phase5_continuous.running import RunningSet, SequenceState
from tests.phase5_continuous.support import request


def state(name: str, number: int, prompt: int, max_tokens: int = 9, tenant: str = "") -> SequenceState:
    one = request(name, [5] * prompt, tenant=tenant)
    return SequenceState(one, (0.0, number), one.total, one.total + max_tokens)


class Patient(PagedCache):
    """A cache that is asked for the same page at most a hundred times: then the question never ends."""

    asked = 0

    def can_grow(self, request: Request, tokens: int) -> bool:
        self.asked += 1
        assert self.asked < 100, f"request {request.id} asks for a page again and again, and none is freed meanwhile"
        return super().can_grow(request, tokens)


def running(
    pages: int, *prompts: int, watermark: int = 0, tenants: str = "   "
) -> tuple[RunningSet, list[SequenceState]]:
    """Pages of four tokens, and running requests with computed prompts."""
    running_set = RunningSet(Patient(pages, 4), watermark)
    named = zip("abc", prompts, tenants, strict=False)
    states = [state(name, n, prompt, tenant=tenant) for n, (name, prompt, tenant) in enumerate(named)]
    for one in states:
        assert running_set.allocate(one, 0)
        one.request.advance(0, one.request.total)
        one.request.append(7, 0)
        one.reset(one.capacity)
    return running_set, states


@pytest.mark.parametrize(("prompt", "fits"), [(16, True), (17, False)])
def test_allocation_leaves_the_watermark_free_while_others_hold_pages(prompt: int, fits: bool) -> None:
    running_set, _ = running(8, 8, watermark=8)  # 2 of 8 pages are in use, 2 must stay free
    one = state("next", 1, prompt)
    assert running_set.allocate(one, 0) is fits
    assert running_set.pool_full is not fits, "the pool is full if the pages did not fit, and only then"
    pages = running_set.cache.usage.referenced
    assert pages == (6 if fits else 2), "pages are taken for the tokens of the request, and not for the watermark"
    assert one.request.state is (RequestState.RUNNING if fits else RequestState.WAITING)


def test_a_request_that_is_preempted_for_a_later_one_is_not_computed_in_this_step() -> None:
    """The tenant of a and b runs two requests, so b gives up its pages for c, although c is the last in rank."""
    running_set, (a, b, c) = running(5, 4, 4, 4, tenants="xxy")
    ready = [one.request.id for one in running_set.allocate_slots([a, b, c])]
    assert ready == ["a", "c"], "b got the last page first, and is preempted when c needs one"
    assert (b.request.state, c.capacity) == (RequestState.PREEMPTED, 8)


def test_preemption_is_pending_while_a_slice_is_in_flight_and_no_other_request_is_preempted_meanwhile() -> None:
    running_set, (a, b, c) = running(3, 4, 4, 4)
    c.schedule(1)
    ready = [one.request.id for one in running_set.allocate_slots([a, b])]
    assert ready == [], "no page is free until the slice of c is committed"
    assert running_set.pending_preemption is c, "c has a slice in flight: it keeps its pages until that is committed"
    assert (c.schedulable, c.request.state, b.request.state) == (False, RequestState.RUNNING, RequestState.RUNNING)
    running_set.preempt_pending()
    assert running_set.pending_preemption is c  # still in flight
    c.in_flight = 0
    running_set.preempt_pending()
    assert (running_set.pending_preemption, c.request.state) == (None, RequestState.PREEMPTED)
    assert running_set.allocate_slots([a]) == [a]


@pytest.mark.parametrize("order", ["ab", "ba"])
def test_a_request_whose_preemption_is_pending_is_not_computed_although_it_has_slots(order: str) -> None:
    running_set, (a, b) = running(2, 4, 3)
    b.in_flight = 1
    named = {"a": a, "b": b}
    ready = running_set.allocate_slots([named[name] for name in order])
    assert running_set.pending_preemption is b, "a needs a page, and b is the last in rank"
    assert ready == [], "a has no page yet, and b takes no part in steps"


def test_a_pending_preemption_is_dropped_when_its_request_ends() -> None:
    running_set, (a, b) = running(2, 4, 4)
    b.schedule(1)
    assert running_set.allocate_slots([a]) == []
    assert not running_set.finish(b)
    assert (running_set.pending_preemption, running_set.finished_in_flight) == (None, 1)
    running_set.preempt_pending()
    assert running_set.num_preemptions == 0, "a request that has ended was preempted"

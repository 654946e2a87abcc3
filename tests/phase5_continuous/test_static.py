from phase0_request import FinishReason, StepOutput
from phase1_kv_pool import PagedCache
from phase5_continuous.static import StaticBatching
from tests.phase5_continuous.support import request


def test_nothing_comes_of_a_slice_whose_request_has_ended_meanwhile() -> None:
    cache = PagedCache(20, 4)
    static = StaticBatching(cache)
    a, b = request("a"), request("b")
    static.submit(a)
    static.submit(b)
    batch = static.plan(0)
    assert static.finish(a, FinishReason.ABORT, 1)
    events = static.commit(batch, StepOutput([7, 8]), 2)
    assert [(event.request.id, event.token) for event in events] == [("a", None), ("b", 8)]
    assert (a.output_tokens, b.output_tokens) == ([], [8])
    assert [piece.request for piece in static.plan(3)] == [b]

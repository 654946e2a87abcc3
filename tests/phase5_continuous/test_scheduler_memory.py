"""The scheduler and its pages: which requests are admitted, which are preempted, and which end out of memory."""

import pytest

from phase0_request import FinishReason, RequestState
from phase1_kv_pool import PagedCache
from phase1_kv_pool.allocator import PageError
from phase3_chunked_prefill.budget import TokenBudget
from phase4_radix.prefix_cache import PrefixCache
from phase5_continuous.policies import ByPriority
from tests.phase5_continuous.moments import engine, names
from tests.phase5_continuous.support import EOS, alone, preempted_of, request

# Admission.


def test_admission_leaves_the_watermark_for_running_requests_to_grow_into() -> None:
    one = engine(pages=20, watermark=0.25)  # 5 pages
    one.submit(request("a", 30, max_tokens=2), request("b", 28, max_tokens=2), request("c", 1, max_tokens=2))
    first = names(one.step())
    assert first == ["a", "b"], f"20 pages, 5 to stay free: a takes 8 and b 7, which leaves 5; admitted: {first}"
    one.run().check_the_end()
    two = engine(pages=20, watermark=0.25)
    two.submit(request("a", 30, max_tokens=2), request("b", 29, max_tokens=2), request("c", 1, max_tokens=2))
    first = names(two.step())
    assert first == ["a"], f"20 pages, 5 to stay free: b needs 8 of the 7 left, and c waits behind b; admitted: {first}"
    two.run().check_the_end()


def test_the_watermark_applies_while_a_finished_request_is_still_in_flight() -> None:
    one = engine(pages=20, watermark=0.25, ahead=1)  # 5 pages
    one.submit(request("ends", 12))  # 3 pages
    one.plan()
    one.scheduler.finish(one.requests["ends"], FinishReason.ABORT, one.now)
    one.submit(request("next", 52))  # 13 pages
    assert not one.plan(), "admitted into the watermark, although a request that has ended still holds pages"
    one.commit()
    admitted = names(one.plan())
    assert admitted == ["next"], f"no other request holds pages: the watermark does not hold; admitted: {admitted}"
    one.run().check_the_end()


def test_a_request_that_did_not_fit_is_admitted_when_one_of_several_running_requests_ends() -> None:
    one = engine(pages=10)
    one.submit(
        request("long", 16, max_tokens=8), request("short", 16, max_tokens=3), request("waits", 12, max_tokens=3)
    )
    while one.requests["waits"].state is RequestState.WAITING:
        one.step()
    assert one.requests["short"].finished, "admitted before a request has ended: it does not fit"
    assert not one.requests["long"].finished, "4 pages are free since `short` ended, and 3 would do: admitted too late"
    one.run().check_the_end()


def test_a_new_request_that_ranks_before_the_one_that_did_not_fit_is_admitted() -> None:
    one = engine(pages=10, policy=ByPriority(10))
    one.submit(request("runs", 16, max_tokens=20), request("large", 32))
    one.step()
    assert one.scheduler.running_set.did_not_fit is one.requests["large"], "did_not_fit names the request without room"
    one.submit(request("urgent", 4, priority=-1))
    step = names(one.step())
    assert step == ["runs", "urgent"], f"it ranks before the one that did not fit, and fits; in the step: {step}"
    one.run().check_the_end()


def test_an_abort_of_the_request_that_did_not_fit_lets_the_next_one_start() -> None:
    one = engine(pages=10)
    one.submit(request("runs", 16, max_tokens=20), request("large", 32), request("small", 4))
    assert names(one.step()) == ["runs"]
    one.scheduler.finish(one.requests["large"], FinishReason.ABORT, one.now)
    assert names(one.step()) == ["runs", "small"], "the request that did not fit is gone: the next one must start"
    one.run().check_the_end()


def test_a_request_that_did_not_fit_is_admitted_when_a_duplicate_frees_its_page() -> None:
    """`a` and `b` say the same, and compute the same page in one step: one of the two pages is freed."""
    one = engine(pages=5, page_size=2, budget=TokenBudget(4, 4), cache=PrefixCache, ahead=1)
    one.submit(request("a", (5, 5, 6), max_tokens=4), request("b", (5, 5, 6), max_tokens=4))
    one.plan()
    one.commit()
    one.plan()
    one.plan()
    one.submit(request("waits", (7, 8), max_tokens=4))
    one.commit()
    assert names(one.plan()) == ["a", "b"]
    one.commit()
    assert names(one.plan()) == ["b", "waits"]
    one.run().check_the_end()


def test_a_request_that_did_not_fit_is_admitted_when_another_has_published_a_page_of_its_prompt() -> None:
    """The prompt of `next` goes on from the answer of `a`, which is preempted, resumes, and computes that again."""
    one = engine(pages=4, page_size=2, budget=TokenBudget(4, 4), cache=PrefixCache)
    a = request("a", (5, 5, 6), max_tokens=4)
    answer, _ = alone(a, EOS)
    one.submit(request("first", (7, 8), max_tokens=4), a, request("next", (5, 5, 6, *answer[:2], 9), max_tokens=4))
    while not preempted_of(one.scheduler):
        one.step()
    while a.state is RequestState.PREEMPTED:
        one.step()
    assert names(one.batches[-1]) == ["a"]
    assert names(one.step()) == ["a", "next"]
    one.run().check_the_end()


@pytest.mark.parametrize(
    ("prompt", "salt"), [((5, 5, 1, 1, 2, 3), "other"), ((4, 4, 6, 6, 7, 7, 9), "")], ids=["salt", "prefix"]
)
def test_a_published_page_that_the_waiting_request_cannot_share_does_not_open_admission(
    prompt: tuple[int, ...], salt: str
) -> None:
    one = engine(pages=6, page_size=2, budget=TokenBudget(4, 6), cache=PrefixCache)
    waits = request("waits", prompt, max_tokens=2, cache_salt=salt)
    one.submit(request("runs", (5, 5, 6, 6, 7, 7, 8, 8), max_tokens=3), waits)
    for published in (4, 8):
        one.step()
        assert one.requests["runs"].computed == published
        assert one.scheduler.running_set.did_not_fit is waits
    one.run().check_the_end()


# Preemption.


def test_a_request_that_was_preempted_for_another_in_the_same_step_gets_no_page() -> None:
    """`a` and `b` both need a third page, and none is free: `b` is preempted for `a` before its own turn comes."""
    one = engine(pages=4)
    one.submit(request("a", 7), request("b", 7))
    one.step()
    one.step()
    running_set = one.scheduler.running_set
    try:
        found = [sequence.request.id for sequence in running_set.allocate_slots(list(running_set.running))]
    except PageError as error:
        pytest.fail(f"b has been preempted for a, and then it is asked for pages of its own: {error}")
    assert found == ["a"], f"b was preempted for a, so a alone is computed in this step, not {found}"
    one.run().check_the_end()


def test_the_last_in_rank_is_preempted_and_resumes_before_waiting_requests() -> None:
    one = engine(pages=9)
    one.submit(*(request(name, 8, max_tokens=20) for name in "abc"))
    while not preempted_of(one.scheduler):
        one.step()
    one.submit(request("d", 1))
    c = one.requests["c"]
    outputs = len(c.output_tokens)
    found = c.state, c.computed, outputs
    assert found == (RequestState.PREEMPTED, 0, 5), f"9 pages for a, b and c: c is preempted with 5 tokens; c: {found}"
    while c.state is RequestState.PREEMPTED:
        one.step()
    (again,) = (piece for piece in one.batches[-1] if piece.request is c)
    found = again.start, again.length
    assert found == (0, 8 + outputs), f"c resumes with all its 13 tokens, as one prompt; (start, length): {found}"
    one.run().check_the_end()


def test_the_first_in_rank_is_never_preempted_so_every_request_ends() -> None:
    """Six requests at once, each of which would fill the pool alone."""
    one = engine(pages=10, max_running=6)
    one.submit(*(request(f"r{n}", 5, max_tokens=34) for n in range(6)))
    while one.scheduler.sequences:
        first = min(
            (sequence for sequence in one.scheduler.sequences if not sequence.request.finished),
            key=lambda sequence: sequence.key,
        )
        one.step()
        state = first.request.state
        assert state in (RequestState.RUNNING, RequestState.FINISHED), f"{first.request.id}, first in rank, is {state}"
        assert one.now < 400, "400 steps, and six requests of 39 tokens have not ended"
    assert one.scheduler.running_set.num_preemptions > 5, "six requests that each fill the pool preempt one another"
    one.check_the_end()


def test_a_preempted_request_reuses_its_cached_pages() -> None:
    computed = {}
    for cache in (PagedCache, PrefixCache):
        one = engine(pages=12, cache=cache)
        one.submit(request("a", 16, max_tokens=12), request("b", 16, max_tokens=20))
        one.run().check_the_end()
        assert one.scheduler.running_set.num_preemptions > 0, "12 pages do not hold two requests of 28 and 36 tokens"
        computed[cache] = sum(batch.num_tokens for batch in one.batches)
    saved = computed[PagedCache] - computed[PrefixCache]
    assert saved == 5 * 4, f"all its full pages but one that was evicted are found again; tokens saved: {saved}"


def test_no_request_is_preempted_for_pages_that_the_next_commit_frees() -> None:
    """`ends` is aborted in flight: the next commit frees its pages, and `grows` waits for that."""
    one = engine(pages=6, ahead=1)
    one.submit(*(request(name, 7, max_tokens=6) for name in ("grows", "ends", "other")))
    while one.requests["grows"].total < 8 or not one.in_flight:
        one.step()
    one.scheduler.finish(one.requests["ends"], FinishReason.ABORT, one.now)
    assert (len(one.scheduler.running_set.leaving), one.scheduler.cache.usage.free) == (1, 0)
    one.run().check_the_end()
    lost = one.scheduler.running_set.num_preemptions
    assert lost == 0, f"the next commit frees the pages that are needed, and {lost} requests are preempted for them"


# Out of memory.


def test_a_request_that_outgrows_the_whole_pool_ends_with_an_error_and_the_next_is_served() -> None:
    one = engine(pages=4)
    one.submit(request("a", 6, max_tokens=50), request("b", 6, max_tokens=5))
    one.run().check_the_end()
    a = one.requests["a"]
    found = a.finish_reason, len(a.output_tokens)
    assert found == (FinishReason.ERROR, 11), f"16 slots, and token 17 has none: a ends with an error; a: {found}"
    assert a.error == "out of memory: it needs 17 tokens, and the whole cache has room for 16"
    assert one.ended["b"] is FinishReason.LENGTH


def test_a_request_that_is_alone_is_not_preempted_for_its_own_pages() -> None:
    one = engine(pages=4)
    one.submit(request("a", 6, max_tokens=50))
    one.run().check_the_end()
    assert one.scheduler.running_set.num_preemptions == 0, "preempted for a page of its own"


def test_no_request_ends_out_of_memory_because_a_step_left_it_out() -> None:
    """A step has room for one decode beside a prompt. It has that of `b`, which is the last in rank and finds no page:
    `b` is preempted, and the step is empty. That is no reason to end `a`."""
    one = engine(pages=4, budget=TokenBudget(2, 2))
    one.submit(request("a", 2, max_tokens=9), request("b", 2, max_tokens=9), request("c", 4, max_tokens=4))
    one.run().check_the_end()
    assert one.scheduler.running_set.num_preemptions > 0, "b finds no page and is not preempted"
    assert set(one.ended.values()) == {FinishReason.LENGTH}, f"a step without room for all is no error: {one.ended}"

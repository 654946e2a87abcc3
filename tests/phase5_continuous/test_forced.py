"""Tokens that a grammar forces: appended with the token before them, and computed by one slice."""

from functools import partial

import pytest

from phase0_request import FinishReason
from phase1_kv_pool import PagedCache
from phase2_prefill_decode.extras.outcome import Forced
from phase3_chunked_prefill.budget import TokenBudget
from phase5_continuous.scheduler import Scheduler
from tests.phase5_continuous.support import VOCABULARY, Engine, request

AHEAD = pytest.mark.parametrize("ahead", [0, 1])


def forces(token: int, share: int = 4, ends: bool = True) -> Forced:
    """A token in `share` forces one to nine others, and some of these end the output."""
    if token % share:
        return Forced()
    return Forced(tuple((token + 7 * i) % VOCABULARY for i in range(1, 2 + token % 9)), ends and token % 3 == 0)


@AHEAD
def test_forced_tokens_are_computed_together(ahead: int) -> None:
    engine = Engine(Scheduler(PagedCache(64, 4), ahead=ahead), partial(forces, share=1, ends=False))
    engine.submit(request("a", 4, 200))
    engine.run().check_the_end()
    lengths = [piece.length for batch in engine.batches for piece in batch]
    assert len(engine.delivered["a"]) == 200
    assert max(lengths) > 6
    assert len(lengths) < (60 if ahead == 0 else 120), "one step ahead, every other slice is computed in vain"


@AHEAD
def test_a_long_run_of_forced_tokens_is_computed_in_chunks(ahead: int) -> None:
    long = Forced(tuple(range(5, 35)))
    engine = Engine(
        Scheduler(PagedCache(64, 4), budget=TokenBudget(8, 8), ahead=ahead),
        lambda token: long if token % 2 else Forced(),
    )
    engine.submit(request("a", 4, 100), request("b", 4, 100))
    engine.run().check_the_end()
    assert max(piece.length for batch in engine.batches for piece in batch) == 8


@AHEAD
def test_the_end_of_a_grammar_ends_a_request_behind_its_last_token(ahead: int) -> None:
    engine = Engine(Scheduler(PagedCache(8, 4), ahead=ahead), lambda token: Forced((8, 9), ends=True))
    engine.submit(request("a", 4, 50))
    engine.run().check_the_end()
    assert engine.delivered["a"][1:] == [8, 9]
    assert engine.ended["a"] is FinishReason.STOP


@pytest.mark.parametrize(("max_tokens", "reason"), [(2, FinishReason.LENGTH), (3, FinishReason.LENGTH)])
@AHEAD
def test_forced_tokens_stop_at_the_length_of_a_request(ahead: int, max_tokens: int, reason: FinishReason) -> None:
    engine = Engine(Scheduler(PagedCache(8, 4), ahead=ahead), lambda token: Forced((8, 9, 10, 11), ends=True))
    engine.submit(request("a", 4, max_tokens))
    engine.run().check_the_end()
    assert (len(engine.delivered["a"]), engine.ended["a"]) == (max_tokens, reason)


def test_forced_tokens_that_do_not_fit_into_the_pool_end_the_request_with_an_error() -> None:
    engine = Engine(Scheduler(PagedCache(2, 4)), lambda token: Forced(tuple(range(10))))
    engine.submit(request("a", 4, 50))
    engine.run().check_the_end()
    assert engine.requests["a"].error == "out of memory: it needs 15 tokens, and the whole cache has room for 8"


@AHEAD
def test_forced_tokens_that_outgrow_the_pool_fail_their_request_and_leave_the_others_their_pages(ahead: int) -> None:
    """It used to preempt its neighbour, which was admitted again, and so on without end."""
    scheduler = Scheduler(PagedCache(3, 2), budget=TokenBudget(1, 4), watermark=0, max_running=2, ahead=ahead)
    engine = Engine(scheduler, lambda token: Forced(tuple(range(5, 13))))
    engine.submit(request("large", 1, 12))
    engine.step()
    engine.submit(request("small", 4, 2))
    engine.run().check_the_end()
    assert engine.ended == {"small": FinishReason.LENGTH, "large": FinishReason.ERROR}
    assert "out of memory" in str(engine.requests["large"].error)

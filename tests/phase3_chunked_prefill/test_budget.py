import pytest
from hypothesis import given
from hypothesis import strategies as st

from phase0_request import Slice
from phase0_request.queue import SequenceState
from phase3_chunked_prefill.budget import StepPlan, TokenBudget, cut
from tests.phase3_chunked_prefill.support import request

# The cut.


@pytest.mark.parametrize(
    ("start", "pending", "room", "page_size", "length"),
    [
        (0, 40, 100, 16, 40),  # fits
        (0, 40, 40, 16, 40),  # just fits: a slice that completes its request is not cut
        (0, 40, 39, 16, 32),  # down to a boundary
        (0, 40, 32, 16, 32),  # on the boundary already
        (0, 40, 15, 16, 15),  # no boundary within reach
        (16, 40, 15, 16, 15),
        (15, 40, 15, 16, 1),  # to the first boundary
        (15, 40, 17, 16, 17),
        (15, 40, 18, 16, 17),
        (5, 40, 7, 1, 7),
        (0, 40, 0, 16, 0),
        (3, 1, 0, 16, 0),
    ],
)
def test_a_chunk_ends_at_a_page_boundary(start: int, pending: int, room: int, page_size: int, length: int) -> None:
    found = cut(start, pending, room, page_size)
    assert found == length, f"{pending} tokens from position {start}, room for {room}, pages of {page_size}"


@given(
    start=st.integers(0, 300),
    pending=st.integers(1, 300),
    room=st.integers(0, 300),
    page_size=st.sampled_from([1, 3, 16, 64]),
)
def test_a_cut_wastes_less_than_a_page_and_never_all_of_it(start: int, pending: int, room: int, page_size: int) -> None:
    length = cut(start, pending, room, page_size)
    most = min(pending, room)
    assert most - page_size < length <= most, "a cut costs less than a page"
    assert (length > 0) == (room > 0), "a step with room computes something"
    if length < most:
        assert (start + length) % page_size == 0, "a chunk shorter than its room ends at a page boundary"


# The budget of a step.


@pytest.mark.parametrize(
    ("decodes", "pending", "wanted"),  # wanted: decodes that fit, tokens left for prompts, of those for short prompts
    [
        (0, [], (0, 64, 0)),
        (10, [], (10, 54, 0)),
        (70, [], (64, 0, 0)),  # without prompts all tokens may go to decodes
        (70, [30], (56, 8, 4)),  # an eighth is left to prompts
        (50, [30], (50, 14, 7)),
        (10, [30, 100], (10, 54, 27)),  # up to half for short prompts
        (10, [5, 100, 6], (10, 54, 11)),  # no more than they can use
        (10, [32, 33], (10, 54, 27)),  # a prompt of a whole chunk is short
        (10, [100, 200], (10, 54, 0)),
    ],
)
def test_a_step_is_split_between_decodes_and_prompts(
    decodes: int, pending: list[int], wanted: tuple[int, int, int]
) -> None:
    step = StepPlan.of_step(TokenBudget(32, 64), 16, decodes, pending)
    found = step.decodes, step.left, step.reserved_for_short
    assert found == wanted, f"(decodes, left, reserved_for_short) of {decodes} decodes and prompts of {pending} tokens"


def test_prompts_take_their_tokens_from_the_step_in_order() -> None:
    step = StepPlan.of_step(TokenBudget(64, 100), 16, 10, [1000, 20, 64, 65])
    assert (step.left, step.reserved_for_short) == (90, 45)
    requests = [request(f"r{n}", length, computed=7 * (n == 2)) for n, length in enumerate((1000, 20, 71, 65))]
    for one in requests:
        step.add_prompt(SequenceState(one))
    wanted = "long, down to a page; short, whole; short, cut at a page; the rest"
    assert [part.length for part in step.slices] == [32, 20, 25, 13], wanted
    assert step.slices[2] == Slice(requests[2], 7, 25)
    assert [sequence.request for sequence in step.sequences] == requests
    assert [length for length in (1000, 65, 64) if step.is_long(length)] == [1000, 65], "more than one chunk of 64"
    assert (step.left, step.reserved_for_short) == (0, 0)
    step.add_prompt(SequenceState(request("late", 5)))
    assert len(step.slices) == 4, "a prompt for which no token is left is not scheduled"


@pytest.mark.parametrize(
    ("left", "reserved", "start", "pending", "length"),
    [
        (40, 10, 0, 1000, 30),  # a long prompt leaves what is reserved for short ones
        (40, 10, 0, 50, 40),  # a short one may have all that is left
        (40, -5, 0, 1000, 40),  # short ones have taken more than was reserved for them: nothing is left of that
        (100, 10, 0, 1000, 64),  # but never more than a chunk
        (10, 10, 0, 1000, 0),
        (0, 0, 0, 5, 0),
        (0, -5, 0, 1000, 0),
    ],
)
def test_a_prompt_gets_what_fits(left: int, reserved: int, start: int, pending: int, length: int) -> None:
    step = StepPlan(limits=TokenBudget(64, 200), page_size=1, decodes=0, left=left, reserved_for_short=reserved)
    found = step.fit(start, pending)
    assert found == length, f"a prompt of {pending} tokens; {left} are left, {reserved} of them for short prompts"
    assert (step.left, step.reserved_for_short) == (left, reserved), "fit takes nothing; add_prompt does"
    fits = left > 0 and left > reserved
    assert step.fits_long == fits, "a long prompt can have a token if some is left, and not all of it is reserved"


# Refusals.


@pytest.mark.parametrize(
    ("chunk", "batched", "message"),
    [
        (0, 64, "max_chunk_size must be an integer from 1, got 0"),
        (True, 64, "max_chunk_size must be an integer from 1, got True"),
        (1, 0, "max_batched_tokens must be an integer from 1, got 0"),
        (1, 2.5, "max_batched_tokens must be an integer from 1, got 2.5"),
        (1, 1, "max_batched_tokens must be at least 2, a decode and a token of a prompt; got 1"),
        (65, 64, r"max_chunk_size must be at most max_batched_tokens \(64\), got 65"),
    ],
)
def test_bad_budgets_are_refused(chunk: int, batched: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TokenBudget(chunk, batched)

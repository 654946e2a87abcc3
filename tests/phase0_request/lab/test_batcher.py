import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phase0_request import (
    Batch,
    Event,
    FinishReason,
    InvalidTransitionError,
    QueueFullError,
    Request,
    RequestState,
    SamplingParams,
    Slice,
    StepOutput,
)
from phase0_request.batch import Commit
from phase0_request.lab.batcher import Batcher

EOS = 0


def commit(batcher: Batcher, batch: Batch, tokens: Sequence[int | None], now: float) -> list[Event]:
    return batcher.commit(batch, StepOutput(tokens), now)


def spans(batcher: Batcher) -> list[tuple[str, int, int]]:
    return [(s.request.id, s.start, s.length) for s in batcher.plan(0.0)]


@pytest.mark.proof
def test_a_waiting_request_joins_as_soon_as_another_finishes(
    make_request: Callable[..., Request],
) -> None:
    """Continuous batching: prefill and decode share the step."""
    batcher = Batcher([EOS], batch_size=2)
    for prompt in (3, 4, 5):
        batcher.submit(make_request(prompt=prompt))
    batch = batcher.plan(0.0)
    slices = [(s.request.id, s.start, s.length) for s in batch]
    assert slices == [("r1", 0, 3), ("r2", 0, 4)], f"both prompts fit into the first step, planned: {slices}"
    commit(batcher, batch, [7, EOS], 1.0)  # r2 ends with its first token
    slices = spans(batcher)
    assert slices == [("r1", 3, 1), ("r3", 0, 5)], f"r1 decodes and r3 takes the place of r2, planned: {slices}"


def test_an_output_token_is_computed_in_the_next_step(make_request: Callable[..., Request]) -> None:
    batcher = Batcher([EOS])
    request = make_request(prompt=3)
    batcher.submit(request)
    seen = []
    for token in (7, 8, 9):
        batch = batcher.plan(0.0)
        (piece,) = batch
        seen.append(request.tokens(piece.start, piece.stop))
        commit(batcher, batch, [token], 1.0)
    assert seen == [[10, 11, 12], [7], [8]], f"a prompt 10 11 12, answered by 7 and 8: its steps computed {seen}"


def test_events_are_tokens_in_order_and_end_with_the_finish_reason(
    make_request: Callable[..., Request],
) -> None:
    batcher = Batcher([EOS])
    request = make_request(max_tokens=2)
    batcher.submit(request)
    first = commit(batcher, batcher.plan(0.0), [7], 1.0)
    second = commit(batcher, batcher.plan(1.0), [8], 2.0)
    assert first == [Event(request, 7, None)]
    assert second == [Event(request, 8, FinishReason.LENGTH)]
    assert not batcher.plan(2.0), "a request that has ended is in the next step"
    assert not batcher.finish(request, FinishReason.ABORT, 3.0)


def test_a_slice_that_does_not_complete_its_request_yields_no_token(make_request: Callable[..., Request]) -> None:
    """A chunk of a prompt, whatever the model returned for it."""
    batcher = Batcher([EOS])
    request = make_request(prompt=5)
    batcher.submit(request)
    batcher.plan(0.0)
    for start, token in ((0, None), (2, 7)):
        events = commit(batcher, Batch((Slice(request, start, 2),)), [token], 1.0)
        assert events == [], f"tokens {start} to {start + 2} of a prompt of 5 yield {events}"
        assert request.output_tokens == []
        assert request.computed == start + 2
    assert commit(batcher, batcher.plan(1.0), [8], 2.0) == [Event(request, 8, None)]


@dataclass
class Several:
    """The outcome of a slice that yields a token and others after it."""

    tokens: Sequence[int]

    def apply(self, commit: Commit, part: Slice, now: float) -> None:
        commit.advance(part.request, part.start, part.length)
        for number, token in enumerate(self.tokens):
            if not part.request.finished:
                commit.append(part.request, token, now, f"the {number}.", predicted=not number)


def test_an_outcome_applies_itself_and_its_request_catches_up(make_request: Callable[..., Request]) -> None:
    batcher = Batcher([EOS])
    request = make_request(prompt=3, max_tokens=4)
    batcher.submit(request)
    (sequence,) = batcher.sequences
    events = batcher.commit(batcher.plan(0.0), StepOutput([7], more={0: Several([7, 8])}), 1.0)
    assert events == [Event(request, 7, None, "the 0."), Event(request, 8, None, "the 1.")]
    assert (request.computed, sequence.num_scheduled, sequence.num_tokens) == (3, 3, 5)
    assert spans(batcher) == [("r1", 3, 2)], "both tokens are computed together"
    events = batcher.commit(batcher.plan(1.0), StepOutput([9], more={0: Several([9, 10, 11])}), 2.0)
    assert [(token, reason) for _, token, reason, _ in events] == [(9, None), (10, FinishReason.LENGTH)]
    assert not batcher.has_work


def test_a_request_aborted_during_a_step_drops_its_result(make_request: Callable[..., Request]) -> None:
    batcher = Batcher([EOS])
    stays, leaves = make_request(), make_request()
    batcher.submit(stays)
    batcher.submit(leaves)
    batch = batcher.plan(0.0)
    assert batcher.finish(leaves, FinishReason.ABORT, 0.5)
    assert commit(batcher, batch, [7, 8], 1.0) == [Event(leaves, None, FinishReason.ABORT), Event(stays, 7, None)]
    assert leaves.output_tokens == []
    batch = batcher.plan(1.0)
    assert [s.request for s in batch] == [stays]
    batcher.finish(stays, FinishReason.ABORT, 1.5)
    events = commit(batcher, batch, [None], 2.0)
    assert events == [Event(stays, None, FinishReason.ABORT)], "a finished request needs no token"


def test_aborting_a_waiting_request_removes_it_from_the_queue(make_request: Callable[..., Request]) -> None:
    batcher = Batcher([EOS], batch_size=1)
    first, second, third = make_request(), make_request(), make_request()
    for request in (first, second, third):
        batcher.submit(request)
    batcher.plan(0.0)
    batcher.finish(second, FinishReason.ABORT, 0.5)
    waiting = [entry.request.id for entry in batcher.waiting]
    assert waiting == [third.id], f"batch size 1, r1 runs and r2 was aborted: {waiting} wait, not ['r3']"


def test_invalid_submissions_are_refused(make_request: Callable[..., Request]) -> None:
    batcher = Batcher([EOS], batch_size=1, queue_limit=1)
    running = make_request()
    batcher.submit(running)
    batcher.plan(0.0)
    with pytest.raises(ValueError, match="r1 is running"):
        batcher.submit(running)
    with pytest.raises(ValueError, match="r1 is here already"):
        batcher.submit(Request("r1", (1,)))
    batcher.submit(make_request())
    refused = make_request()
    with pytest.raises(QueueFullError):
        batcher.submit(refused)
    assert refused.state is RequestState.WAITING
    with pytest.raises(ValueError, match="batch_size must be an integer from 1, got 0"):
        Batcher([EOS], batch_size=0)


@pytest.mark.parametrize("tokens", [[EOS, None], [EOS], [EOS, 7, 7]], ids=["missing", "too few", "too many"])
def test_an_incomplete_step_output_changes_no_request(
    make_request: Callable[..., Request], tokens: list[int | None]
) -> None:
    batcher = Batcher([EOS])
    requests = [make_request(), make_request()]
    for request in requests:
        batcher.submit(request)
    with pytest.raises(ValueError, match=r"no token for request r2|the output holds"):
        commit(batcher, batcher.plan(0.0), tokens, 1.0)
    computed = [request.computed for request in requests]
    assert computed == [0, 0], f"the step {tokens} was refused after it had advanced a request: {computed}"
    assert not any(request.finished for request in requests)


def test_committing_a_step_twice_raises(make_request: Callable[..., Request]) -> None:
    batcher = Batcher([EOS])
    request = make_request()
    batcher.submit(request)
    batch = batcher.plan(0.0)
    commit(batcher, batch, [7], 1.0)
    with pytest.raises(InvalidTransitionError, match=r"request r1 .* 3 of 4 are computed"):
        commit(batcher, batch, [7], 1.0)


@settings(max_examples=60)
@given(
    arrivals=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9), st.integers(0, 12)), min_size=1, max_size=25),
    batch_size=st.integers(1, 5),
    seed=st.integers(0, 1000),
)
def test_every_request_finishes_and_each_token_is_computed_and_delivered_once(
    arrivals: list[tuple[int, int, int]], batch_size: int, seed: int
) -> None:
    """Any arrivals and batch sizes, with aborts in between. The batch size is never exceeded."""
    rng = random.Random(seed)
    batcher = Batcher([EOS], batch_size)
    todo = [
        (at, Request(f"r{n}", tuple(range(1, prompt + 1)), SamplingParams(max_tokens=answer)))
        for n, (prompt, answer, at) in enumerate(arrivals)
    ]
    requests = [request for _, request in todo]
    computed: dict[str, list[int]] = {request.id: [] for request in requests}
    delivered: dict[str, list[int | None]] = {request.id: [] for request in requests}
    ended: list[str] = []
    for step in range(1000):
        for arrival in [a for a in todo if a[0] <= step]:
            todo.remove(arrival)
            batcher.submit(arrival[1])
        batch = batcher.plan(step)
        if not batch and not todo:
            break
        live = len(batcher.running) + len(batcher.waiting)
        assert len(batch) == min(batch_size, live), (
            f"{len(batch)} of {live} requests in a step, batch size {batch_size}"
        )
        named = [s.request.id for s in batch]
        assert len(set(named)) == len(named), f"a request has two slices in one step: {named}"
        for piece in batch:
            computed[piece.request.id] += range(piece.start, piece.stop)
        if batch and rng.random() < 0.1:
            victim = rng.choice([s.request for s in batch])
            assert batcher.finish(victim, FinishReason.ABORT, step)
        for request, token, reason, _ in commit(batcher, batch, [rng.randint(1, 99) for _ in batch], step):
            assert request.id not in ended, f"an event for request {request.id}, which has ended"
            if token is not None:
                delivered[request.id].append(token)
            if reason is not None:
                ended.append(request.id)
    left = {request.id for request in requests} - set(ended)
    assert not left, f"after 1000 steps with batch size {batch_size}, {sorted(left)} have not ended"
    for request in requests:
        once = list(range(len(computed[request.id])))
        assert computed[request.id] == once, f"request {request.id} computed tokens {computed[request.id]}"
        told = delivered[request.id]
        assert told == request.output_tokens, f"request {request.id} has {request.output_tokens}, delivered: {told}"
        if request.finish_reason is FinishReason.LENGTH:
            assert len(request.output_tokens) == request.params.max_tokens

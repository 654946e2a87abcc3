from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from phase0_request import FinishReason, InvalidTransitionError, Request, RequestState
from tests.phase0_request.support import refused

LIVE_STATES = (RequestState.WAITING, RequestState.RUNNING, RequestState.PREEMPTED)


def in_state(state: RequestState) -> Request:
    request = Request("r", (1, 2, 3))
    if state is not RequestState.WAITING:
        request.admit(1.0)
    if state is RequestState.PREEMPTED:
        request.preempt()
    if state is RequestState.FINISHED:
        request.finish(FinishReason.LENGTH, 2.0)
    assert request.state is state
    return request


@pytest.mark.parametrize("prompt", [(), (1, -1), (1, 2.0), ("a",), (True,)])
def test_a_prompt_is_one_or_more_token_ids(prompt: tuple[object, ...]) -> None:
    with pytest.raises(ValueError, match="request r: "):
        Request("r", prompt)  # type: ignore[arg-type]


ALLOWED: dict[str, tuple[Callable[[Request], object], set[RequestState]]] = {
    "admit": (lambda r: r.admit(1.0), {RequestState.WAITING, RequestState.PREEMPTED}),
    "advance": (lambda r: r.advance(0, 1), {RequestState.RUNNING}),
    "preempt": (lambda r: r.preempt(), {RequestState.RUNNING}),
    "stop": (lambda r: r.finish(FinishReason.STOP, 2.0), {RequestState.RUNNING, RequestState.PREEMPTED}),
    "length": (lambda r: r.finish(FinishReason.LENGTH, 2.0), {RequestState.RUNNING, RequestState.PREEMPTED}),
    "error": (lambda r: r.finish(FinishReason.ERROR, 2.0, "broken"), set(LIVE_STATES)),
    "timeout": (lambda r: r.finish(FinishReason.TIMEOUT, 2.0), set(LIVE_STATES)),
    "abort": (lambda r: r.finish(FinishReason.ABORT, 2.0), set(LIVE_STATES)),
}


@pytest.mark.parametrize("state", list(RequestState), ids=lambda s: s.value)
@pytest.mark.parametrize("name", list(ALLOWED))
def test_every_transition_refuses_every_wrong_state(name: str, state: RequestState) -> None:
    action, allowed = ALLOWED[name]
    request = in_state(state)
    if state in allowed:
        action(request)
        return
    refused(InvalidTransitionError, rf"request r \({state.value}\) cannot", action, request)
    assert request.state is state, f"{name} was refused and left a {state.value} request {request.state.value}"


def test_only_the_finish_reason_error_has_a_message() -> None:
    with pytest.raises(ValueError, match="error message"):
        in_state(RequestState.RUNNING).finish(FinishReason.ERROR, 1.0)
    with pytest.raises(ValueError, match="error message"):
        in_state(RequestState.RUNNING).finish(FinishReason.STOP, 1.0, "no")
    with pytest.raises(InvalidTransitionError):  # the state is checked first
        in_state(RequestState.FINISHED).finish(FinishReason.ERROR, 1.0)
    request = in_state(RequestState.RUNNING)
    request.finish(FinishReason.ERROR, 1.0, "NaN in the logits")
    assert (request.finish_reason, request.error) == (FinishReason.ERROR, "NaN in the logits")


def test_append_needs_all_tokens_computed() -> None:
    request = in_state(RequestState.RUNNING)
    refused(InvalidTransitionError, "0 of 3 are computed", request.append, 7, 1.0)
    request.advance(0, 2)
    refused(InvalidTransitionError, "2 of 3 are computed", request.append, 7, 1.0)
    assert request.total == 3, f"a refused append left tokens {request.output_tokens}"
    request.advance(2, 1)
    request.append(7, 1.0)
    counts = request.computed, request.total
    assert counts == (3, 4), f"a prompt of 3 and one token: {counts[0]} of {counts[1]} tokens are computed, not 3 of 4"
    refused(InvalidTransitionError, "3 of 4 are computed", request.append, 8, 1.0)
    request.append(8, 1.0, predicted=False)
    assert (request.computed, request.output_tokens) == (3, [7, 8]), "not every token is predicted"


def test_a_preempted_request_keeps_its_tokens_and_computes_all_of_them_again() -> None:
    request = in_state(RequestState.RUNNING)
    request.advance(0, 3)
    request.append(7, 1.0)
    request.preempt()
    kept = request.prompt_tokens, request.output_tokens, request.state
    assert kept == ((1, 2, 3), [7], RequestState.PREEMPTED), f"after a preemption: {kept}"
    assert request.computed == 0, f"its pages are gone, and {request.computed} tokens still count as computed"
    request.admit(2.0)
    request.advance(0, 4)


@pytest.mark.parametrize(("start", "length"), [(1, 0), (1, -1), (1, 3), (0, 1), (0, 3), (2, 1)])
def test_advance_starts_at_computed_and_ends_within_known_tokens(start: int, length: int) -> None:
    request = in_state(RequestState.RUNNING)
    request.advance(0, 1)
    refused(InvalidTransitionError, "1 of 3 are computed", request.advance, start, length)
    assert request.computed == 1, f"a refused advance({start}, {length}) left {request.computed} tokens computed, not 1"


@pytest.mark.parametrize(
    ("field", "value", "allowed"),
    [
        ("arrival", float("nan"), "a finite number, got nan"),
        ("arrival", None, "a finite number, got None"),
        ("priority", 1.5, "an integer from -2147483648 to 2147483648, got 1.5"),
        ("priority", 1 << 40, "an integer from -2147483648 to 2147483648"),
        ("cache_salt", "x" * 257, r"a string of at most 256 characters, got 'xxx.*[.]{3}$"),
        ("cache_salt", None, "a string of at most 256 characters, got None"),
    ],
)
def test_fields_that_come_from_a_client_are_checked(field: str, value: object, allowed: str) -> None:
    with pytest.raises(ValueError, match=f"request r: {field} must be {allowed}"):
        Request("r", (1,), **{field: value})  # type: ignore[arg-type]


def test_a_stop_string_in_the_last_text_replaces_only_the_reason_length() -> None:
    request = in_state(RequestState.FINISHED)
    request.stop_after_all()
    assert request.finish_reason is FinishReason.STOP
    for other in (request, in_state(RequestState.RUNNING), in_state(RequestState.WAITING)):
        with pytest.raises(InvalidTransitionError, match="not by length"):
            other.stop_after_all()


def test_tokens_run_over_prompt_and_output_as_one_sequence() -> None:
    request = in_state(RequestState.RUNNING)
    for token in (4, 5, 6):
        request.advance(request.computed, request.total - request.computed)
        request.append(token, 1.0)
    whole = [1, 2, 3, 4, 5, 6]
    for start in range(7):
        for stop in range(start, 7):
            assert request.tokens(start, stop) == whole[start:stop]
    for start, stop in ((0, 7), (-1, 2), (3, 2)):
        with pytest.raises(IndexError, match="tokens 0 to 6"):
            request.tokens(start, stop)


def test_latencies_are_computed_from_the_timestamps() -> None:
    request = Request("r", (1,), arrival=10.0)
    times = request.times
    assert (times.queue_time, times.ttft, times.itl, times.e2e) == (None, None, [], None)
    request.admit(12.0)
    for token, now in ((5, 13.0), (6, 13.5), (7, 14.5)):
        request.advance(request.computed, 1)
        request.append(token, now)
    request.preempt()
    request.admit(20.0)
    request.finish(FinishReason.LENGTH, 21.0)
    found = times.queue_time, times.ttft, times.itl, times.e2e
    assert found == (2.0, 3.0, [0.5, 1.0], 11.0), f"queue time, TTFT, ITLs and end-to-end time of {times}: {found}"


class Transitions(RuleBasedStateMachine):
    """Random legal transitions: output is never lost, computed never exceeds total, FINISHED is final."""

    def __init__(self) -> None:
        super().__init__()
        self.request = Request("r", tuple(range(5)))
        self.output: list[int] = []
        self.now = 0.0

    def tick(self) -> float:
        self.now += 1.0
        return self.now

    @precondition(lambda self: self.request.state in (RequestState.WAITING, RequestState.PREEMPTED))
    @rule()
    def admit(self) -> None:
        self.request.admit(self.tick())

    @precondition(lambda self: self.request.state is RequestState.RUNNING)
    @rule(share=st.floats(0, 1))
    def step(self, share: float) -> None:
        left = self.request.total - self.request.computed
        length = max(1, round(left * share))
        self.request.advance(self.request.computed, length)
        if length == left:
            self.request.append(len(self.output), self.tick())
            self.output.append(len(self.output))

    @precondition(lambda self: self.request.state is RequestState.RUNNING)
    @rule()
    def preempt(self) -> None:
        self.request.preempt()
        assert self.request.computed == 0, f"{self.request.computed} tokens count as computed after a preemption"

    @rule(reason=st.sampled_from([FinishReason.TIMEOUT, FinishReason.ABORT]), luck=st.integers(0, 9))
    def end(self, reason: FinishReason, luck: int) -> None:
        if luck or self.request.finished:
            return
        self.request.finish(reason, self.tick())

    @invariant()
    def holds(self) -> None:
        request = self.request
        tokens, times = request.output_tokens, request.times.tokens
        assert tokens == self.output, f"the output must be {self.output}, is {tokens}"
        assert 0 <= request.computed <= request.total, f"{request.computed} of {request.total} tokens are computed"
        assert len(times) == len(tokens), f"{len(tokens)} output tokens have the timestamps {times}"
        assert times == sorted(times), f"timestamps of tokens: {times}"
        assert request.finished == (request.finish_reason is not None) == (request.times.finished is not None)


Transitions.TestCase.settings = settings(max_examples=100, stateful_step_count=40)
TestTransitions = Transitions.TestCase

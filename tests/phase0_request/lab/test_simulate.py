from collections.abc import Callable

import pytest

from phase0_request import FinishReason, Request, SamplingParams
from phase0_request.lab.mock_model import MockModel, StepCost
from phase0_request.lab.simulate import simulate

EOS = 0
MODEL = MockModel({(1,): [5]}, EOS, StepCost(step=10, prefill_token=1, decode_token=0))


def at(arrival: float, prompt: int, answer: int, name: str = "r") -> Request:
    return Request(name, (1,) * prompt, SamplingParams(max_tokens=answer, ignore_eos=True), arrival=arrival)


def test_times_follow_from_the_step_costs() -> None:
    """By hand: 10 ms a step and 1 ms a prompt token. The second request waits, for the batch size is one."""
    first, second = at(0.0, prompt=4, answer=3, name="a"), at(0.005, prompt=2, answer=1, name="b")
    summary = simulate([second, first], MODEL, [EOS], batch_size=1)
    assert first.times.tokens == pytest.approx([0.014, 0.024, 0.034])
    assert (second.times.admitted, second.times.tokens) == (pytest.approx(0.034), pytest.approx([0.046]))
    assert summary.ttft == pytest.approx((0.014, 0.041))
    assert summary.seconds == pytest.approx(0.046)


def test_the_clock_jumps_to_the_next_arrival(make_request: Callable[..., Request]) -> None:
    late = at(100.0, prompt=1, answer=1)
    summary = simulate([late], MODEL, [EOS], batch_size=4)
    assert late.times.e2e == pytest.approx(0.011)
    assert late.finish_reason is FinishReason.LENGTH
    assert summary.requests == 1
    assert simulate([], MODEL, [EOS], batch_size=4).requests == 0


def test_requests_that_arrive_together_are_served_in_their_order() -> None:
    requests = [at(0.0, prompt=1, answer=1, name=name) for name in "abc"]
    simulate(requests, MODEL, [EOS], batch_size=1)
    ends = [request.times.finished or 0.0 for request in requests]
    assert ends == sorted(ends)

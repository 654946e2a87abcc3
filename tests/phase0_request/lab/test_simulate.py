import pytest

from phase0_request import Request, SamplingParams
from phase0_request.lab.mock_model import MockModel, StepCost
from phase0_request.lab.simulate import simulate

MODEL = MockModel({(1,): [5]}, 0, StepCost(step=10, prefill_token=1, decode_token=0))


def at(arrival: float, prompt: int, answer: int, name: str) -> Request:
    return Request(name, (1,) * prompt, SamplingParams(max_tokens=answer, ignore_eos=True), arrival=arrival)


def test_times_follow_from_the_step_costs() -> None:
    """By hand: 10 ms a step and 1 ms a prompt token. The second and third wait, for the batch size is one; between them
    and the last the clock jumps."""
    first, second, third = at(0.0, 4, 3, "a"), at(0.005, 2, 1, "b"), at(0.005, 2, 1, "c")
    late = at(100.0, 1, 1, "d")
    summary = simulate([late, second, third, first], MODEL, [0], batch_size=1)
    assert first.times.tokens == pytest.approx([0.014, 0.024, 0.034])
    assert (second.times.admitted, second.times.tokens) == (pytest.approx(0.034), pytest.approx([0.046]))
    assert third.times.tokens == pytest.approx([0.058])
    assert late.times.e2e == pytest.approx(0.011)
    assert summary.ttft == pytest.approx((0.014, 0.041, 0.053, 0.011))
    assert (summary.requests, summary.seconds) == (4, pytest.approx(100.011))

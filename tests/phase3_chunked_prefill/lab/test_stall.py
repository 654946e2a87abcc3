"""The stall scene and its figures, which are computed from given times."""

import pytest

from phase0_request.params import SamplingParams
from phase0_request.request import FinishReason, Request
from phase3_chunked_prefill.lab.stall import Outcome, Played, judge


def at(moments: list[float], arrival: float = 0.0) -> Request:
    """A request that got its tokens at these times."""
    params = SamplingParams(max_tokens=len(moments))
    request = Request("r", (1, 2), params, arrival=arrival)
    request.admit(arrival)
    request.advance(0, 2)
    for n, moment in enumerate(moments):
        request.append(7, moment)
        if n + 1 < len(moments):
            request.advance(request.computed, 1)
    request.finish(FinishReason.LENGTH, moments[-1])
    return request


def test_gaps_are_counted_from_the_arrival_of_the_long_prompt_to_its_first_token() -> None:
    # It arrives at 10 and has its token at 20. The gap from 20 to 35 comes after that, those up to 10 are calm.
    decodes = [at([7.5, 8.0, 10.0, 14.0, 20.0, 35.0]), at([6.0, 9.0, 11.0, 20.0, 21.0, 30.0])]
    outcome = judge(64, Played([], decodes, at([20.0], arrival=10.0)))
    assert outcome.p99_gap_ms == pytest.approx(8910.0)
    assert outcome == Outcome(
        chunk=64,
        calm_gap_ms=2000.0,  # of 0.5, 2 and 3
        p50_gap_ms=5000.0,  # of 2 (begun at 9), 4, 6 and 9 seconds
        p99_gap_ms=outcome.p99_gap_ms,
        worst_gap_ms=9000.0,
        ttft_ms=10_000.0,
        total_ms=25_000.0,
    )

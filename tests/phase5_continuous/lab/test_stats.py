from phase0_request.params import SamplingParams
from phase0_request.request import FinishReason, Request
from phase5_continuous.lab.stats import SLO, Stats


def ended(arrival: float, tokens: list[float], reason: FinishReason = FinishReason.STOP) -> Request:
    request = Request("r", (5,), SamplingParams(max_tokens=64), arrival=arrival)
    request.admit(arrival)
    for moment in tokens:
        request.advance(request.computed, request.total - request.computed)
        request.append(9, moment)
    request.finish(reason, tokens[-1] if tokens else arrival + 1)
    return request


def test_an_slo_is_met_by_ttft_and_gap_together() -> None:
    slo = SLO(ttft=1.0, gap=0.5)
    assert slo.met(ended(0.0, [1.0, 1.1, 1.5]))
    assert slo.met(ended(0.0, [0.3]))
    assert not slo.met(ended(0.0, [1.01, 1.1]))
    assert not slo.met(ended(0.0, [0.5, 0.6, 0.7, 1.3]))  # one long gap, however short the others are
    assert not slo.met(ended(0.0, []))
    assert not slo.met(ended(0.0, [0.5], FinishReason.TIMEOUT))


def test_goodput_is_counted_over_the_time_of_arrivals() -> None:
    """Not over the time until the last request is served. A refused request counts as arrived, and misses its SLO."""
    stats = Stats(SLO(ttft=1.0))
    for number in range(4):
        stats.arrive(2.0 * number)
        if number != 3:
            stats.end(ended(2.0 * number, [2.0 * number + (1.5 if number == 1 else 0.5)]))
    stats.refused = 1
    outcome = stats.outcome(100.0, 0)
    assert (outcome.attainment, outcome.goodput) == (2 / 4, 2 / 6.0)
    together = Stats()
    together.arrive(0.0)
    together.end(ended(0.0, [0.5]))
    assert together.outcome(4.0, 0).goodput == 1 / 4.0

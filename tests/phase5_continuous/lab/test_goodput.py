"""The goodput study, from which the chapter's tables come."""

from phase5_continuous.lab import goodput


def test_goodput_equals_the_arrival_rate_when_every_request_meets_its_slo() -> None:
    """However many requests happen to arrive, and however long the last ones take."""
    for rate in (5, 20):
        found = goodput.poisson("fcfs", rate, seconds=4)
        assert (found.requests, found.kept, found.goodput) == (4 * rate, 1.0, rate)


def test_above_capacity_goodput_falls_the_longer_it_lasts() -> None:
    short, long = (goodput.poisson("fcfs", 400, seconds) for seconds in (2, 4))
    assert 0 < long.goodput == 400 * long.kept < 0.8 * short.goodput < 300
    assert long.ttft_p50_ms > 1.5 * short.ttft_p50_ms

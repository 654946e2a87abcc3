"""The summary of a run: throughput and latencies over its finished requests."""

import math

import pytest

from phase0_request import FinishReason, Request
from phase0_request.lab.metrics import percentile, summarize


def test_summarize_over_finished_requests() -> None:
    requests = [Request("a", (1,), arrival=0.0), Request("b", (1,), arrival=1.0), Request("c", (1,), arrival=2.0)]
    for request, moments in zip(requests, [(2.0, 3.0, 5.0), (4.0,), ()], strict=True):
        if moments:
            request.admit(moments[0] - 0.5)
        for n, now in enumerate(moments):
            request.advance(request.computed, 1)
            request.append(n, now)
        request.finish(FinishReason.TIMEOUT, (moments or (9.0,))[-1])
    summary = summarize([*requests, Request("still going", (1,))])
    assert summarize(requests[::-1]).seconds == summary.seconds
    assert (summary.requests, summary.tokens, summary.seconds) == (3, 4, 9.0)
    assert summary.tokens_per_second == pytest.approx(4 / 9)
    assert (summary.queue, summary.ttft, summary.itl, summary.e2e) == ((1.5, 2.5), (2.0, 3.0), (1.0, 2.0), (5, 3, 7))
    assert math.isnan(summarize([]).tokens_per_second)
    assert math.isnan(percentile([], 50))

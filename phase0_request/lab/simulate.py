"""Simulate the batcher and the mock model in virtual time: deterministic, and fast on any machine."""

from collections.abc import Iterable

from phase0_request.lab.batcher import Batcher
from phase0_request.lab.metrics import Summary, summarize
from phase0_request.lab.mock_model import MockModel
from phase0_request.request import Request


def simulate(requests: Iterable[Request], model: MockModel, eos_ids: Iterable[int], batch_size: int) -> Summary:
    """Serve requests from their arrival times on. Only the cost of steps advances the clock."""
    by_arrival = sorted(requests, key=lambda request: request.arrival)
    ahead = by_arrival[::-1]
    batcher = Batcher(frozenset(eos_ids), batch_size)
    now = 0.0
    while True:
        while ahead and ahead[-1].arrival <= now:
            batcher.submit(ahead.pop())
        batch = batcher.plan(now)
        if batch:
            tokens = model.step(batch)
            now += model.cost.of(batch) / 1000
            batcher.commit(batch, tokens, now)
        elif ahead:
            now = ahead[-1].arrival
        else:
            return summarize(by_arrival)

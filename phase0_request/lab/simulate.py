"""The same batcher and the same mock in virtual time: minutes of serving in milliseconds, the same on any machine."""

from collections.abc import Iterable

from phase0_request.lab.batcher import Batcher
from phase0_request.lab.mock_model import MockModel
from phase0_request.metrics import Summary, summarize
from phase0_request.request import Request


def simulate(requests: Iterable[Request], model: MockModel, eos_ids: Iterable[int], batch_size: int) -> Summary:
    """Serve requests, each from its own arrival on. Time passes by what the steps cost, and by nothing else."""
    everyone = sorted(requests, key=lambda request: request.arrival)
    ahead = everyone[::-1]
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
            return summarize(everyone)

"""Simulate the batcher and the mock model in virtual time: deterministic, and fast on any machine."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from phase0_request.batch import Batch, StepOutput
from phase0_request.core import EngineCore, Step
from phase0_request.lab.batcher import Batcher
from phase0_request.lab.metrics import Summary, summarize
from phase0_request.lab.mock_model import MockModel
from phase0_request.request import Request


@dataclass(slots=True)
class VirtualRunner:
    """Runs a mock model in no time, and advances its own clock by the cost of each step."""

    model: MockModel
    now: float = 0.0

    def pack(self, batch: Batch) -> StepOutput:
        self.now += self.model.cost.of(batch) / 1000
        return StepOutput(self.model.step(batch))

    def launch(self, output: StepOutput) -> "Finished":
        return Finished(output)


@dataclass(frozen=True, slots=True)
class Finished:
    """A step with an output that is known before it runs."""

    result: StepOutput

    def output(self) -> StepOutput:
        return self.result


def steps(requests: Iterable[Request], model: MockModel, batcher: Batcher) -> Iterator[Step]:
    """Serve requests from their arrivals on. Only the cost of steps advances the clock."""
    coming = sorted(requests, key=lambda request: request.arrival)[::-1]  # of equal arrivals the first comes first
    runner = VirtualRunner(model)
    core = EngineCore(batcher, runner, lambda: runner.now)
    while coming or core.has_work:
        while coming and coming[-1].arrival <= runner.now:
            core.submit(coming.pop())
        step = core.step()
        if step is None:
            runner.now = coming[-1].arrival
        else:
            yield step


def simulate(requests: Iterable[Request], model: MockModel, eos_ids: Iterable[int], batch_size: int) -> Summary:
    """Serve requests to their ends."""
    by_arrival = sorted(requests, key=lambda request: request.arrival)
    for _ in steps(by_arrival, model, Batcher(frozenset(eos_ids), batch_size)):
        pass
    return summarize(by_arrival)

"""Simulate the batcher and the mock model in virtual time: deterministic, and fast on any machine."""

from collections.abc import Iterable
from dataclasses import dataclass

from phase0_request.batch import Batch, StepOutput
from phase0_request.core import EngineCore
from phase0_request.lab.batcher import Batcher
from phase0_request.lab.mock_model import MockModel
from phase0_request.metrics import Summary, summarize
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
    """A step whose output is known."""

    result: StepOutput

    def output(self) -> StepOutput:
        return self.result


def simulate(requests: Iterable[Request], model: MockModel, eos_ids: Iterable[int], batch_size: int) -> Summary:
    """Serve requests from their arrival times on. Only the cost of steps advances the clock."""
    by_arrival = sorted(requests, key=lambda request: request.arrival)
    ahead, runner = by_arrival[::-1], VirtualRunner(model)
    core = EngineCore(Batcher(frozenset(eos_ids), batch_size), runner, lambda: runner.now)
    while ahead or core.has_work:
        while ahead and ahead[-1].arrival <= runner.now:
            core.submit(ahead.pop())
        if core.step() is None:
            runner.now = ahead[-1].arrival
    return summarize(by_arrival)

"""The overlap lab: a device that is not there, on a clock that only the test moves."""

from dataclasses import dataclass

import pytest

from phase0_request.batch import Batch
from phase0_request.core import EngineCore
from phase0_request.params import SamplingParams
from phase0_request.request import Request
from phase1_kv_pool.cache import PagedCache
from phase5_continuous.lab.virtual import VirtualClock, VirtualStep
from phase5_continuous.scheduler import Scheduler
from phase6_integration.lab.overlap import FakeDevice, Landing


@dataclass
class HostAndDevice:
    """A runner: the host takes `host` seconds to pack a step, and the device `work` seconds to run it."""

    host: float
    work: float
    clock: VirtualClock
    device: FakeDevice

    def pack(self, batch: Batch) -> VirtualStep:
        self.clock.now += self.host
        return VirtualStep(batch, [1] * len(batch), len(batch))

    def launch(self, step: VirtualStep) -> Landing:
        return Landing(step, self.device, self.device.launch(self.work))


def steps(ahead: int, host: float, work: float, count: int = 50) -> FakeDevice:
    clock = VirtualClock()
    device = FakeDevice(clock, lambda until: setattr(clock, "now", until))
    runner = HostAndDevice(host, work, clock, device)
    core = EngineCore(Scheduler(PagedCache(16), ahead=ahead), runner, clock)
    core.submit(Request("one", (1,), SamplingParams(max_tokens=count, ignore_eos=True)))
    for _ in core.run():
        pass
    assert len(device.steps) == count
    return device


@pytest.mark.parametrize(
    ("ahead", "host", "work", "share"),
    [(0, 2.0, 6.0, 2 / 8), (1, 2.0, 6.0, 0), (0, 6.0, 2.0, 6 / 8), (1, 6.0, 2.0, 4 / 6), (0, 0.0, 3.0, 0)],
)
def test_one_step_ahead_hides_the_host_unless_it_is_slower_than_the_device(
    ahead: int, host: float, work: float, share: float
) -> None:
    device = steps(ahead, host, work)
    wall = device.steps[-1][1] - device.steps[0][0]
    idle = share * (wall - work) / wall  # no host before the first step, whose work is in it
    assert device.idle_share == pytest.approx(idle, abs=1e-9 if host == 0 else 0.01)
    assert all(before[1] <= after[0] for before, after in zip(device.steps, device.steps[1:], strict=False))

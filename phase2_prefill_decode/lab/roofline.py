"""The roofline of a device, and the least time of a step on it.

A kernel waits for arithmetic or for memory, whichever takes longer. Its intensity says which: the operations it has
for each byte. Below the device's ridge memory is the roof, above it arithmetic.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any

from phase2_prefill_decode.lab.cost import Cost, CostModel, Part


@dataclass(frozen=True, slots=True)
class Device:
    """Two ceilings, the overhead of every step, and the cache that `CostModel` may count on."""

    name: str
    flops: float  # operations a second
    bytes_per_second: float
    overhead: float = 0.0  # seconds a step
    cache: int = 0  # bytes of its L2, which all multiprocessors share

    def __post_init__(self) -> None:
        if not (self.flops > 0 and self.bytes_per_second > 0 and self.overhead >= 0 and self.cache >= 0):
            raise ValueError(f"a device has a speed above 0, an overhead and a cache from 0, got {self}")

    @property
    def ridge(self) -> float:
        """The arithmetic intensity at which arithmetic and memory take equally long."""
        return self.flops / self.bytes_per_second

    def attainable(self, intensity: float) -> float:
        """The roof: operations a second that a kernel of this intensity can reach."""
        return min(self.flops, intensity * self.bytes_per_second)


MIB = 1 << 20
# Datasheet peaks, dense bfloat16 with float32 sums. Where a sheet has only the rate of 2:4 sparse matrices, half of it.
# L2 as published for each chip.
DEVICES = {
    device.name: device
    for device in (
        Device("H200", 989e12, 4.8e12, cache=50 * MIB),  # H200 Tensor Core GPU datasheet, SXM: 1,979 TFLOPS sparse
        Device("H100 SXM", 989e12, 3.35e12, cache=50 * MIB),  # H100 Tensor Core GPU datasheet: 1,979 TFLOPS sparse
        Device("A100 80GB", 312e12, 2.039e12, cache=40 * MIB),  # A100 80GB datasheet, SXM
        Device("RTX 4090", 165.2e12, 1.008e12, cache=72 * MIB),  # Ada GPU architecture whitepaper, appendix A
        Device("L4", 121e12, 0.3e12, cache=48 * MIB),  # L4 Tensor Core GPU datasheet: 242 TFLOPS sparse
    )
}


def named(name: str) -> Device:
    """The device of this name."""
    if name not in DEVICES:
        raise ValueError(f"no datasheet for {name!r}; known are {', '.join(DEVICES)}; any other can be measured")
    return DEVICES[name]


def measured(result: Mapping[str, Any] | str | Path, dtype: str = "bfloat16", calls: int = 0) -> Device:
    """The device that `python -m phase2_prefill_decode.lab ceilings --json FILE` met: the file, or what stands in it.

    Its memory is as fast as it reads, for reading is what decode does. `calls` is how many operators a step starts
    (`CostModel.calls`); each costs the host the time of one that has nothing to do.
    """
    content = result if isinstance(result, Mapping) else json.loads(Path(result).read_text("utf-8"))
    best = content["figures"]["best"]
    speeds = {name.removeprefix("gflops_"): speed for name, speed in best.items() if name.startswith("gflops_")}
    if dtype not in speeds:
        raise ValueError(f"no matrix product was measured in {dtype!r}, only in {', '.join(speeds)}")
    overhead = calls * best["call_us"] / 1e6
    return Device(str(content["device"]), speeds[dtype] * 1e9, best["read_gb_per_second"] * 1e9, overhead)


@dataclass(frozen=True, slots=True)
class Timing:
    """The seconds of a part's arithmetic alone, and of its memory traffic alone."""

    compute: float = 0.0
    memory: float = 0.0

    @property
    def seconds(self) -> float:
        return max(self.compute, self.memory)

    @property
    def bound(self) -> str:
        return "compute" if self.compute > self.memory else "memory"


@dataclass(frozen=True, slots=True)
class Prediction:
    """The least time of a step. Its parts run one after the other, each at its own roof."""

    parts: Mapping[str, Timing]
    overhead: float = 0.0

    @property
    def seconds(self) -> float:
        return self.overhead + sum(part.seconds for part in self.parts.values())

    @property
    def bound(self) -> str:
        """Where most of the time goes: "compute", "memory" or "overhead"."""
        times = {"compute": 0.0, "memory": 0.0, "overhead": self.overhead}
        for part in self.parts.values():
            times[part.bound] += part.seconds
        return max(times, key=times.__getitem__)


# region predict
def timing(part: Part, device: Device) -> Timing:
    return Timing(part.operations / device.flops, part.bytes / device.bytes_per_second)


def predict(cost: Cost, device: Device) -> Prediction:
    """The time of one step.

    Each part has its own roof: in one step the linears may wait for arithmetic while attention waits for memory.
    """
    return Prediction({name: timing(part, device) for name, part in cost.parts.items()}, device.overhead)


# endregion


def crossover(model: CostModel, device: Device) -> int | None:
    """The batch at which a decode step's linears leave the memory roof: from it on, their arithmetic takes longer.

    None where they never do, because the activations that a token moves take longer than its arithmetic.
    """
    decode = model.pieces([(0, 1)]).linears
    weights = decode.weights / device.bytes_per_second  # seconds, whatever the batch
    moving = decode.activations / device.bytes_per_second
    a_token = decode.operations / device.flops - moving  # by which arithmetic gains
    return ceil(weights / a_token) if a_token > 0 else None

"""Steps as tensors, without an engine."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from phase0_request.batch import Batch, StepOutput
from phase1_kv_pool.cache import PagedCache
from phase2_prefill_decode.decoder import StepTensors
from phase2_prefill_decode.sampling.processors import Work
from phase2_prefill_decode.sampling.sampler import Columns
from phase2_prefill_decode.step.device_state import DeviceState
from phase2_prefill_decode.step.packed import PackedStep, pack
from phase2_prefill_decode.step.runner import LaunchedStep

CPU = torch.device("cpu")


class Asked(NamedTuple):
    """What the slices of a step ask of the sampler."""

    columns: Columns
    works: Sequence[Work]


def loaded(
    batch: Batch, cache: PagedCache, device: torch.device = CPU, state: DeviceState | None = None
) -> StepTensors:
    """The tensors of a step; by default over a device state of its own."""
    state = state or DeviceState(device)
    state.reserve(cache)
    step = pack(batch, cache, state.width)
    return state.load(step, step.to(device))


def output_of(draws: tuple[Tensor, Tensor], works: Sequence[Work], drawn: Sequence[int], slices: int) -> StepOutput:
    """The output of a step of which the slices `drawn` complete their requests."""
    step = PackedStep.empty()._replace(works=works, slice_numbers=tuple(drawn), slices=slices)
    return LaunchedStep(step, *draws).output()


class NothingWaits(TorchDispatchMode):
    """Refuses operators with a result or shape that depends on what a device has computed."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        masks = [one for one in args[1] or () if one is not None] if func._schema.name == "aten::index" else []
        name = func._schema.name.removeprefix("aten::")
        waits = {"_local_scalar_dense", "nonzero", "masked_select", "item", "unique", "is_nonzero", "equal"}
        if name in waits or any(one.dtype == torch.bool for one in masks):
            raise AssertionError(f"`{name}` makes the host wait: its result depends on numbers that are on the device")
        return func(*args, **(kwargs or {}))

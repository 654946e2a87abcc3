"""ExpertCounts: how many experts the steps of a model read, and how evenly their tokens are spread.

A layer of experts leaves on the device how many rows its experts have, and the next step writes to the same place. So
they are copied when the next step is planned, which is before its launch, or else when the step itself is committed.
Nothing waits for the device beyond the step's own tokens.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from phase0_request.core import CoreObserver, Step
from phase2_prefill_decode.transfer import to_host


class ExpertCounts(CoreObserver):
    """The counts of an engine's steps, from the next one on."""

    def __init__(self, ends: Sequence[Tensor]) -> None:
        """`ends`, for each layer with experts: [experts], the number of rows of the experts up to each one."""
        self.number = len(ends[0])
        self._ends = ends
        self._latest: Step | None = None  # launched last, and not copied yet

    def planned(self, step: Step) -> None:
        self._copy()
        self._latest = step

    def discarded(self) -> None:
        self._latest = None

    def of(self, step: Step) -> list[float] | None:
        """Of a step that is committed, for a layer on average: experts that it read, rows of the expert with the most,
        and rows of all. None if the step is older than this."""
        if step is self._latest:
            self._copy()
        for ends, event in (note for of, note in step.notes if of is self):
            if event is not None:
                event.synchronize()
            rows = ends.diff(dim=1, prepend=ends.new_zeros(len(ends), 1))
            figures = (rows > 0).sum(1), rows.amax(1), ends[:, -1]
            return [round(figure.float().mean().item(), 2) for figure in figures]
        return None

    def _copy(self) -> None:
        """Start to copy the counts of the step that was launched last."""
        if self._latest is None:
            return
        copy, event = to_host(torch.stack([*self._ends])), None
        if self._ends[0].is_cuda:
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
        self._latest.notes += ((self, (copy, event)),)
        self._latest = None

"""Masks: a processor that lets requests draw only what their constraints allow."""

from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from phase0_request.batch import NO_TOKEN_LEFT, Batch, StepOutput
from phase0_request.params import SamplingParams
from phase0_request.request import Request
from phase2_prefill_decode.extras.grammar.constraints import (
    Constraints,
    Filled,
    Follower,
    Rows,
    in_flight,
    is_constrained,
)
from phase2_prefill_decode.extras.grammar.mask import apply_mask_on
from phase2_prefill_decode.extras.outcome import drawn_of, outcome_of
from phase2_prefill_decode.sampling.processors import DrawRow, Processor, Work
from phase2_prefill_decode.sampling.sampler import Sampler
from phase2_prefill_decode.transfer import moved


class Masks(Processor):
    """Keeps the constraint of a request as long as the request lives."""

    def __init__(
        self, constraints: Constraints, device: str | torch.device = "cpu", eos_ids: Collection[int] = ()
    ) -> None:
        self.constraints, self.device, self.eos_ids = constraints, torch.device(device), eos_ids
        self.apply = apply_mask_on(self.device)
        self._of_requests: WeakKeyDictionary[Request, Follower] = WeakKeyDictionary()

    def wants(self, params: SamplingParams) -> bool:
        return is_constrained(params)

    def pack(self, batch: Batch, draws: Sequence[DrawRow]) -> Work | None:
        first = {draw.number: draw for draw in reversed(draws) if is_constrained(draw.part.request.params)}
        return MasksWork(self, [*reversed(first.values())]) if first else None

    def prepare(self, request: Request) -> None:
        self.constraint_of(request)

    def constraint_of(self, request: Request) -> Follower:
        """The constraint of a live request. If making one takes time, ask for it before the first draw."""
        constraint = self._of_requests.get(request)
        if constraint is None:
            constraint = self._of_requests[request] = self.constraints.of(request)
        return constraint


def masks_of(sampler: Sampler) -> Masks:
    """The masks of a sampler."""
    return next(each for each in sampler.processors if isinstance(each, Masks))


class MasksWork(Work):
    """The masks of one step. The host fills them while the device runs the model."""

    def __init__(self, masks: Masks, draws: Sequence[DrawRow]) -> None:
        """`draws` are the first of each slice."""
        self.masks, self.draws = masks, draws
        self.constrained: Rows = [
            (row, masks.constraint_of(part.request), index, [*part.beyond]) for row, _, part, index in draws
        ]
        self._filling: Callable[[], Filled] | None = None
        self._filled: Filled | None = None

    @property
    def in_flight(self) -> bool:
        return in_flight(self.constrained)

    def start(self) -> None:
        self._filling = self.masks.constraints.start(self.constrained)

    def cancel(self) -> None:
        if self._filling is not None:
            with suppress(Exception):  # the masks are filled no longer: their constraints may go back
                self._filling()

    def edit(self, logits: Tensor) -> Tensor:
        constraints = self.masks.constraints
        filling, self._filling = self._filling, None
        self._filled = constraints.fill(self.constrained) if filling is None else filling()
        masked = [row + place for row, _, _, draft in self.constrained for place in range(1 + len(draft))]
        masks = {row: number for number, row in enumerate(masked)}
        of_rows = moved(torch.tensor([masks.get(row, -1) for row in range(len(logits))]), self.masks.device)
        return self.masks.apply(logits, moved(self._filled.bits, self.masks.device), of_rows)

    def finish(self, output: StepOutput, tokens: Sequence[int], peaks: Sequence[float]) -> None:
        """Pass the drawn tokens to their constraints, and add the tokens that grammars force after them."""
        late = self._filled.late if self._filled is not None else {}
        followed = []
        for (_, number, _, _), (row, constraint, index, _) in zip(self.draws, self.constrained, strict=True):
            if row in late and output.failed.get(number) == NO_TOKEN_LEFT:  # its mask is empty
                del output.failed[number]
                outcome_of(output, number).late = late[row]
            elif output.tokens[number] is None:
                output.failed[number] = constraint.error or output.failed[number]
            else:
                drawn = drawn_of(output, number)
                for place, token in enumerate(drawn, index):
                    constraint.take(place, token)
                followed.append((number, constraint, index + len(drawn) - 1))
        for number, constraint, index in followed:  # when all have their tokens: they may work side by side
            forced = constraint.forced(index)
            if forced is not None:
                outcome_of(output, number).forced = forced

"""Processor: something that requests may ask for besides a draw. It edits logits, or collects results.

    pack -> start -> (the model runs) -> edit -> (the draw) -> collect -> finish

An engine has one of each processor. In a step whose requests ask for it, the processor makes a `Work`, whose methods
are called in this order. Nearly all steps have none.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from phase0_request.batch import Batch, Slice, StepOutput
from phase0_request.params import SamplingParams
from phase0_request.request import Request


class DrawRow(NamedTuple):
    """A row of logits from which a token is drawn."""

    row: int
    number: int  # index of the slice in its batch
    part: Slice
    output_index: int  # where the token is in the request's output


class Work:
    """The work of a processor in one step. A subclass overrides the methods that it needs."""

    rows: Sequence[int] = ()  # tokens of the step whose final hidden states it needs

    @property
    def in_flight(self) -> bool:
        """Whether it depends on a token of the previous step. That step must end first. Its output is not
        committed yet, so the processor keeps what it needs of it in `finish`."""
        return False

    def start(self) -> None:
        """The model is about to run. Called only if nothing is in flight: work on the host can begin."""

    def cancel(self) -> None:
        """The model has failed: wait for what `start` began."""

    def edit(self, logits: Tensor) -> Tensor:
        """Change the logits that tokens are drawn from, [draws, vocab], in a copy."""
        return logits

    def collect(self, logits: Tensor, tokens: Tensor, hidden: Tensor) -> None:
        """Take the results that it needs, on the device, and start to copy them to the host.

        logits: [draws, vocab], the model's own; tokens: [draws]; hidden: [its `rows`, hidden_size].
        """

    def finish(self, output: StepOutput, tokens: Sequence[int], peaks: Sequence[float]) -> None:
        """The results are on the host: add them to the output of the step. Each draw has a token and a peak."""


class Processor(ABC):
    """Makes the work of steps."""

    @abstractmethod
    def wants(self, params: SamplingParams) -> bool:
        """Whether a request with these parameters may ever ask for it."""

    def prepare(self, request: Request) -> None:  # noqa: B027 most need nothing
        """Get ready for a request that wants it, before its first step. ValueError if it cannot be served."""

    @abstractmethod
    def pack(self, batch: Batch, draws: Sequence[DrawRow]) -> Work | None:
        """The work of a step. None if no request asks for it in this step."""

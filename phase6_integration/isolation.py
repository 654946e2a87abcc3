"""IsolatingRunner: a step that raises costs those who made it raise their answer, and nobody else."""

import logging
from collections.abc import Sequence
from typing import Generic, TypeVar

from phase0_request.batch import Batch, Slice, StepOutput
from phase0_request.request import Request, TokenLogprobs
from phase1_kv_pool.cache import KVCache
from phase5_continuous.core import Launched, Packed, Runner

log = logging.getLogger(__name__)
P = TypeVar("P", bound=Packed)
BLAMED = "it made a step of the engine fail"


class BrokenError(RuntimeError):
    """It is not one request's fault: nothing can be computed any more."""


class Attempt(Generic[P]):
    """A step that may have failed already. `packed` is None if it did."""

    def __init__(self, batch: Batch, packed: P | None) -> None:
        self.batch = batch
        self.packed = packed
        self.slices = len(batch)
        self.drawn = tuple(number for number, piece in enumerate(batch.slices) if piece.completes)


class IsolatingRunner(Generic[P]):
    """A runner around another. When a step raises, its slices are run again one by one: to compute the same keys and
    values twice changes nothing. Those that raise alone are failures of their requests, the others have their tokens.
    If all of them raise, a slice of nobody's is tried. If that raises too, the engine is broken."""

    def __init__(self, runner: Runner[P], cache: KVCache) -> None:
        self.runner = runner
        self.cache = cache
        self.isolated = 0  # steps that had to be run slice by slice

    def pack(self, batch: Batch) -> Attempt[P]:
        try:
            return Attempt(batch, self.runner.pack(batch))
        except Exception:
            log.exception("packing a step of %d slices failed", len(batch))
            return Attempt(batch, None)

    def launch(self, attempt: Attempt[P]) -> "InHand[P]":
        launched = None
        if attempt.packed is not None:
            try:
                launched = self.runner.launch(attempt.packed)
            except Exception:
                log.exception("a step of %d slices failed", attempt.slices)
        return InHand(self, attempt, launched)

    # region one_by_one
    def one_by_one(self, batch: Batch) -> StepOutput:
        self.isolated += 1
        tokens: list[int | None] = [None] * len(batch)
        failed: dict[int, str] = {}
        logprobs: dict[int, TokenLogprobs] = {}
        scores: dict[int, Sequence[TokenLogprobs]] = {}
        raised = 0
        # region exercise 6.3
        for number, piece in enumerate(batch.slices):
            try:
                output = self._alone(piece)
            except Exception:
                log.exception("request %s fails alone too", piece.request.id)
                failed[number], raised = BLAMED, raised + 1
                continue
            tokens[number] = output.tokens[0]
            for why in output.failed.values():
                failed[number] = why
            for found in output.logprobs.values():
                logprobs[number] = found
            for of_prompt in output.prompt_logprobs.values():
                scores[number] = of_prompt
        if raised == len(batch):
            self._probe()
        # endregion
        return StepOutput(tokens, failed, logprobs, scores)

    # endregion

    def _alone(self, piece: Slice) -> StepOutput:
        packed = self.runner.pack(Batch((piece,)))
        return self.runner.launch(packed).output(packed.drawn, packed.slices)

    def _probe(self) -> None:
        """One token of nobody's. Nothing is proven if there is no page for it."""
        request = Request("\0probe", (0,))
        self.cache.attach(request)
        try:
            if self.cache.can_grow(request, 1):
                self.cache.grow(request, 1)
                self._alone(Slice(request, 0, 1))
        except Exception as error:
            raise BrokenError(f"no step can be computed any more ({type(error).__name__})") from error
        finally:
            self.cache.release(request)


class InHand(Generic[P]):
    """A step that is on the device, or that could not be brought there."""

    def __init__(self, runner: IsolatingRunner[P], attempt: Attempt[P], launched: Launched | None) -> None:
        self._runner = runner
        self._attempt = attempt
        self._launched = launched

    def output(self, numbers: Sequence[int], slices: int) -> StepOutput:
        if self._launched is not None:
            try:
                return self._launched.output(numbers, slices)
            except Exception:
                log.exception("a step of %d slices failed on the device", slices)
        return self._runner.one_by_one(self._attempt.batch)

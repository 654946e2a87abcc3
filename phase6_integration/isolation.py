"""IsolatingRunner: when a step raises, only the requests that cause the error fail; the others get their tokens."""

import logging
from collections.abc import Sequence
from typing import Generic, TypeVar

from phase0_request.batch import Batch, Slice, StepOutput
from phase0_request.request import Request, TokenLogprobs
from phase1_kv_pool.cache import KVCache
from phase5_continuous.core import Launched, PackedBatch, Runner

log = logging.getLogger(__name__)
P = TypeVar("P", bound=PackedBatch)
BLAMED = "it made a step of the engine fail"


class BrokenError(RuntimeError):
    """No request is at fault: the engine cannot compute any step."""


class Attempt(Generic[P]):
    """A packed step. `packed` is None if packing failed."""

    def __init__(self, batch: Batch, packed: P | None) -> None:
        self.batch = batch
        self.packed = packed
        self.slices = len(batch)
        self.drawn = tuple(number for number, piece in enumerate(batch.slices) if piece.completes)


class IsolatingRunner(Generic[P]):
    """Wraps a runner. When a step raises, its slices run again one by one; computing the same keys and values twice
    changes nothing. A slice that raises alone fails its request. If every slice raises, a probe request is run; if that
    raises too, the engine is broken."""

    def __init__(self, runner: Runner[P], cache: KVCache) -> None:
        self.runner = runner
        self.cache = cache

    def pack(self, batch: Batch) -> Attempt[P]:
        try:
            return Attempt(batch, self.runner.pack(batch))
        except Exception:
            log.exception("packing a step of %d slices failed", len(batch))
            return Attempt(batch, None)

    def launch(self, attempt: Attempt[P]) -> "IsolatedStep[P]":
        launched = None
        if attempt.packed is not None:
            try:
                launched = self.runner.launch(attempt.packed)
            except Exception:
                log.exception("a step of %d slices failed", attempt.slices)
        return IsolatedStep(self, attempt, launched)

    # region one_by_one
    def one_by_one(self, batch: Batch) -> StepOutput:
        """Run each slice of a failed step as a step of its own, and collect tokens and failures."""
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
        """Run one token of a probe request. Without a free page for it the probe is skipped."""
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


class IsolatedStep(Generic[P]):
    """A launched step, or one whose launch failed. `output` falls back to running its slices one by one."""

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

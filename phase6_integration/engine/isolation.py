"""IsolatingRunner: when a step raises, only the requests that cause the error fail; the others get their tokens.

LoadShedding: when steps fail and no request causes it, as when memory is short, they get smaller. If that does not help
either, the engine is broken.
"""

import logging
from dataclasses import fields, replace
from typing import Any, Generic, TypeVar

from phase0_request.batch import Batch, Slice, StepOutput
from phase0_request.core import EngineCore, Launched, Runner, Step
from phase0_request.request import Request
from phase5_continuous.scheduler import Scheduler

log = logging.getLogger(__name__)
P = TypeVar("P")
BY_SLICE = [field.name for field in fields(StepOutput) if field.name != "tokens"]  # results by the number of a slice
BLAMED = "it made a step of the engine fail"
FAILED_STEPS = 6  # in a row, each half as large as the one before, after which the engine is broken
CALM_STEPS = 256  # without a failure, after which steps may be twice as large again


class StepFailedError(RuntimeError):
    """A step failed, and no request is at fault. It can be planned again."""


class BrokenError(RuntimeError):
    """No request is at fault: the engine cannot compute any step."""


class LoadShedding:
    """Adapts the token budget of steps to the engine's capacity. A step that fails through no request's fault
    halves it; steps that succeed double it again, up to its original size. FAILED_STEPS in a row raise BrokenError."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._full = scheduler.budget
        self._failed = 0  # steps in a row
        self._calm = 0  # steps since the last failure or change

    def succeeded(self) -> None:
        self._failed = 0
        if self._scheduler.budget is self._full:
            return
        self._calm += 1
        if self._calm >= CALM_STEPS:
            self._resize(self._scheduler.budget.max_batched_tokens * 2)

    def failed(self, why: str) -> None:
        self._failed += 1
        if self._failed >= FAILED_STEPS:
            raise BrokenError(f"no step can be computed any more ({why})")
        self._resize(self._scheduler.budget.max_batched_tokens // 2)

    def _resize(self, tokens: int) -> None:
        self._calm, full = 0, self._full
        tokens = max(tokens, 2)
        smaller = replace(full, max_batched_tokens=tokens, max_chunk_size=min(full.max_chunk_size, tokens))
        self._scheduler.budget = smaller if tokens < full.max_batched_tokens else full
        log.warning("steps have at most %d tokens from now on", self._scheduler.budget.max_batched_tokens)


class IsolatedStep(Generic[P]):
    """A step, which may have failed already. `output` falls back to running its slices one by one."""

    def __init__(self, runner: "IsolatingRunner[P]", batch: Batch) -> None:
        self.batch = batch
        self.packed: P | None = None  # None: packing has failed
        self.launched: Launched | None = None  # None: launching has failed
        self.failures = 0  # of the runner, when this step was launched
        self._runner = runner

    def output(self) -> StepOutput:
        if self.failures != self._runner.failures:
            raise StepFailedError("a step before it failed, so it read tokens and keys that were never computed")
        if self.launched is not None:
            try:
                output = self.launched.output()
            except Exception:
                log.exception("a step of %d slices failed on the device", len(self.batch))
            else:
                self._runner.shedding.succeeded()
                return output
        self._runner.failures += 1
        return self._runner.one_by_one(self.batch)


class IsolatingRunner(Generic[P]):
    """Wraps a runner. When a step raises, its slices run again one by one; computing the same keys and values twice
    changes nothing. If a slice raises alone, a probe of the same shape runs in its place: if that succeeds, the request
    fails; if not, the whole step does."""

    def __init__(self, runner: Runner[P], shedding: LoadShedding) -> None:
        self.runner = runner
        self.shedding = shedding
        self.failures = 0  # steps that failed: those launched before one was known are void

    def pack(self, batch: Batch) -> IsolatedStep[P]:
        step = IsolatedStep(self, batch)
        try:
            step.packed = self.runner.pack(batch)
        except Exception:
            log.exception("packing a step of %d slices failed", len(batch))
        return step

    def launch(self, step: IsolatedStep[P]) -> IsolatedStep[P]:
        step.failures = self.failures
        if step.packed is not None:
            try:
                step.launched = self.runner.launch(step.packed)
            except Exception:
                log.exception("a step of %d slices failed", len(step.batch))
        return step

    # region exercise 6.5
    def one_by_one(self, batch: Batch) -> StepOutput:
        """Run each slice of a failed step as a step of its own, and collect tokens and failures."""
        tokens: list[int | None] = [None] * len(batch)
        by_slice: dict[str, dict[int, Any]] = {name: {} for name in BY_SLICE}
        blamed = False
        for number, part in enumerate(batch.slices):
            try:
                output = self._alone(part)
            except Exception:
                log.exception("request %s fails alone too", part.request.id)
                self._probe(part)
                by_slice["failed"][number], blamed = BLAMED, True
                continue
            tokens[number] = output.tokens[0]
            for name, results in by_slice.items():
                for result in getattr(output, name).values():
                    results[number] = result
        if not blamed:
            self.shedding.failed(f"{len(batch)} slices together")
        return StepOutput(tokens, **by_slice)

    # endregion

    def _alone(self, part: Slice) -> StepOutput:
        return self.runner.launch(self.runner.pack(Batch((part,)))).output()

    def _probe(self, part: Slice) -> None:
        """Run a slice of the same shape with nothing of the request in it: token 0 everywhere, default sampling. It has
        the request's id and so its pages; their contents are of no use any more. StepFailedError if it raises too."""
        request = part.request
        probe = Request(request.id, (0,) * len(request.prompt_tokens))
        probe.output_tokens += [0] * len(request.output_tokens)
        try:
            self._alone(Slice(probe, part.start, part.length, (0,) * len(part.beyond)))
        except Exception as error:
            why = f"{type(error).__name__} at {part.length} tokens"
            self.shedding.failed(why)
            raise StepFailedError(why) from error


class IsolatingCore(EngineCore[Scheduler, IsolatedStep[P]]):
    """The engine loop over an IsolatingRunner. A step that fails through no request's fault is planned again by the
    next call, and returned as an empty one: requests that ended in flight have freed their pages."""

    def complete(self) -> Step:
        try:
            return super().complete()
        except StepFailedError:  # nothing is half done
            self._in_flight.clear()
            self.scheduler.plan_again()
            for observer in self.observers:
                observer.discarded()
            return Step(events=self.drain())

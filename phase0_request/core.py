"""EngineCore: the engine's loop. Plan, pack, run and commit a step, again and again.

It knows neither models nor time: a scheduler decides, a runner computes, and a clock tells the time. Every phase runs
this loop: over a mock model it is phase 0's server, over phase 2's ModelRunner an engine, and over a cost model in
place of runner and clock a simulator.
"""

import heapq
import itertools
import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar
from weakref import ref

from phase0_request.batch import Batch, Event, StepOutput
from phase0_request.request import FinishReason, Request
from phase0_request.scheduler import BaseScheduler
from phase0_request.support.checks import check_number


class EngineFailedError(BaseException):
    """The engine cannot compute another step, and no request is at fault. Only code that ends the engine catches it."""


class Launched(Protocol):
    """A step that may still be on the device. `output` waits for it."""

    def output(self) -> StepOutput: ...


S = TypeVar("S", bound=BaseScheduler)
P = TypeVar("P")  # a batch as the runner packs it


class Runner(Protocol[P]):
    """Computes steps: phase 2's ModelRunner, for example."""

    def pack(self, batch: Batch) -> P: ...

    def launch(self, step: P) -> Launched: ...


@dataclass(slots=True)
class Step:
    """What one step did, and how many seconds its parts took. When the engine runs ahead, the plan, pack and commit of
    one step overlap the `run` of its neighbour. Without a batch nothing ran, and the events come from elsewhere, such
    as an abort."""

    batch: Batch = field(default_factory=Batch)  # committed: `completes` of its slices no longer holds
    prefill_tokens: int = 0
    decode_tokens: int = 0
    pages: int = 0  # held by live requests while it ran
    start: float = 0.0  # when its plan began
    plan: float = 0.0
    pack: float = 0.0
    run: float = 0.0  # from the launch until the tokens are on the host
    commit: float = 0.0
    seconds: float = 0.0  # from the start of its plan, or the end of the step before, to the end of its commit
    events: list[Event] = field(default_factory=list)
    notes: tuple[tuple["CoreObserver", Any], ...] = ()  # what observers keep with the step until it is committed


class CoreObserver:
    """The loop calls these methods. Each does nothing unless an observer defines it."""

    def submitted(self, request: Request) -> None:
        """A request was queued."""

    def planned(self, step: Step) -> None:
        """A step was planned and packed, and is about to be launched."""

    def completed(self, step: Step) -> None:
        """A step was committed. Without a batch, its events happened outside of steps."""

    def discarded(self) -> None:
        """The steps in flight were forgotten."""


class EngineCore(Generic[S, P]):
    """Serves requests, one step at a time.

    With a scheduler that runs ahead, the loop launches a step before it has committed the previous one. The runner must
    then take from the device tokens that the host does not know yet.
    """

    def __init__(self, scheduler: S, runner: Runner[P], clock: Callable[[], float] = time.perf_counter) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self.clock = clock
        self.steps = 0
        self.observers: list[CoreObserver] = []
        self._in_flight: deque[tuple[Step, Launched]] = deque()
        self._ended = -math.inf  # when the last step was committed
        self._deadlines: list[tuple[float, int, ref[Request]]] = []  # a heap, ended requests among them
        self._number = itertools.count()

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return self.scheduler.has_work

    def submit(self, request: Request, timeout: float | None = None) -> None:
        """Queue a request, and end it at the latest `timeout` seconds after its arrival. ValueError if it could never
        be served, QueueFullError if the queue is at its limit."""
        if timeout is not None:
            check_number(f"request {request.id}: timeout", timeout, 0, above=True)
        self.scheduler.submit(request)
        if timeout is not None:
            heapq.heappush(self._deadlines, (request.arrival + timeout, next(self._number), ref(request)))
        for observer in self.observers:
            observer.submitted(request)

    def finish(self, request: Request, reason: FinishReason, error: str | None = None) -> bool:
        """End a request from outside. False if it has already ended."""
        return self.scheduler.finish(request, reason, self.clock(), error)

    def abort(self, request: Request) -> bool:
        """End a request after its client has disconnected. Legal at any moment."""
        return self.finish(request, FinishReason.ABORT)

    def stop(self, request: Request) -> None:
        """End a request because its text contains a stop string, which even its last possible token may complete."""
        if request.finish_reason is FinishReason.LENGTH:
            request.stop_after_all()
        else:
            self.finish(request, FinishReason.STOP)

    # region exercise 0.5
    def step(self) -> Step | None:
        """Launch steps until as many are in flight as are allowed, then wait for the oldest and commit it.

        Returns None if there was nothing to do. If anything raises, the error is passed on, and the next call plans
        again what was in flight.
        """
        try:
            while len(self._in_flight) <= self.scheduler.ahead and self.launch():
                pass
            if self._in_flight:
                return self.complete()
        except BaseException:
            self.discard_in_flight()
            raise
        events = self.drain()
        return Step(events=events) if events else None

    # endregion

    def launch(self) -> Step | None:
        """Plan, pack and launch one step. None, and nothing is launched, if the plan is empty."""
        clock, start = self.clock, self.clock()
        self._end_overdue(start)
        batch = self.scheduler.plan(start)
        if not batch:
            return None
        planned = clock()
        packed = self.runner.pack(batch)
        ready = clock()
        prefill, decode = batch.tokens_by_kind
        step = Step(batch, prefill, decode, self.scheduler.pages_used, start, planned - start, ready - planned)
        for observer in self.observers:
            observer.planned(step)
        self._in_flight.append((step, self.runner.launch(packed)))
        return step

    def complete(self) -> Step:
        """Wait for the oldest step in flight and commit it."""
        step, launched = self._in_flight.popleft()
        output = launched.output()
        done = self.clock()
        step.events = self.scheduler.commit(step.batch, output, done)
        self.steps += 1
        before, self._ended = self._ended, self.clock()
        step.run, step.commit = done - (step.start + step.plan + step.pack), self._ended - done
        step.seconds = self._ended - max(step.start, before)
        for observer in self.observers:
            observer.completed(step)
        return step

    def _end_overdue(self, now: float) -> None:
        """End the live requests past their deadline."""
        while self._deadlines and self._deadlines[0][0] <= now:
            request = heapq.heappop(self._deadlines)[2]()
            if request is not None:
                self.scheduler.finish(request, FinishReason.TIMEOUT, now)

    def discard_in_flight(self) -> None:
        """Forget the steps in flight, because one of them raised. They are planned again."""
        self._in_flight.clear()
        self.scheduler.discard_in_flight()
        for observer in self.observers:
            observer.discarded()

    def drain(self) -> list[Event]:
        """Return the events since the last step, for a caller that will not take another."""
        events = self.scheduler.drain()
        for observer in self.observers if events else ():
            observer.completed(Step(events=events))
        return events

    def run(self) -> Iterator[Step]:
        """Run steps until no request is left. The caller may submit and abort between two steps."""
        while self.has_work:
            step = self.step()
            if step is not None:
                yield step

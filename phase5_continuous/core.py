"""EngineCore: the engine's loop. Plan, pack, run and commit a step, again and again.

It knows neither models nor time: a runner computes, and a clock tells the time. With phase 2's ModelRunner and a real
clock it is an engine; with a cost model in place of both it is a simulator.
"""

import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Generic, NamedTuple, Protocol, TypeVar

from phase0_request.batch import Batch, Event, Slice, StepOutput
from phase0_request.request import FinishReason, Request
from phase1_kv_pool.cache import PagedCache


class PackedBatch(Protocol):
    """A batch that is ready to run: which of its slices complete their requests, and how many slices there are."""

    @property
    def drawn(self) -> Sequence[int]: ...

    @property
    def slices(self) -> int: ...


class Launched(Protocol):
    """A step that may still be on the device. `output` waits for it."""

    def output(self) -> StepOutput: ...


P = TypeVar("P", bound=PackedBatch)


class Runner(Protocol[P]):
    """Computes steps: phase 2's ModelRunner, for example."""

    def pack(self, batch: Batch) -> P: ...

    def launch(self, step: P) -> Launched: ...


class SchedulerInterface(Protocol):
    """Plans and commits steps: Scheduler does, and static batching in the lab."""

    @property
    def cache(self) -> PagedCache: ...

    @property
    def ahead(self) -> int: ...

    @property
    def has_work(self) -> bool: ...

    def submit(self, request: Request, timeout: float | None = None) -> None: ...

    def finish(self, request: Request, reason: FinishReason, now: float, error: str | None = None) -> bool: ...

    def plan(self, now: float) -> Batch: ...

    def commit(self, batch: Batch, output: StepOutput, now: float) -> list[Event]: ...

    def drain(self) -> list[Event]: ...

    def discard_in_flight(self) -> None: ...


class Spent(NamedTuple):
    """Seconds of a step, by part. `run` lasts from the launch until the tokens are on the host. Ahead, the other
    parts of a step are within the `run` of another."""

    plan: float
    pack: float
    run: float
    commit: float


class Step(NamedTuple):
    """What one step did."""

    batch: Batch  # committed: `completes` and `is_decode` of its slices no longer hold
    prefill_tokens: int
    decode_tokens: int
    pages: int  # held by live requests while it ran
    spent: Spent
    events: list[Event]
    seconds: float = 0.0  # from the start of its plan, or the end of the step before, to the end of its commit

    @staticmethod
    def empty(events: list[Event]) -> "Step":
        """A step in which nothing ran. Its events come from outside of steps: an abort, say."""
        return Step(Batch(), 0, 0, 0, Spent(0.0, 0.0, 0.0, 0.0), events)


class _InFlight(NamedTuple, Generic[P]):
    batch: Batch
    packed: P
    launched: Launched
    pages: int
    start: float  # moments: the plan begins, the plan is made, the batch is packed
    planned: float
    ready: float


class EngineCore(Generic[P]):
    """Serves requests, one step at a time.

    With a scheduler that runs ahead, a step is launched before the previous one has been committed. The runner must
    then take tokens from the device that the host does not know yet.
    """

    def __init__(
        self, scheduler: SchedulerInterface, runner: Runner[P], clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self.clock = clock
        self.steps = 0
        self._in_flight: deque[_InFlight[P]] = deque()
        self._ended = -math.inf  # when the last step was committed

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return self.scheduler.has_work

    def submit(self, request: Request, timeout: float | None = None) -> None:
        """Queue a request, which ends at the latest `timeout` seconds after its arrival. ValueError if it could never
        be served, QueueFullError if the queue is at its limit."""
        self.scheduler.submit(request, timeout)

    def finish(self, request: Request, reason: FinishReason, error: str | None = None) -> bool:
        """End a request from outside: by a stop string, say. False if it had ended before."""
        return self.scheduler.finish(request, reason, self.clock(), error)

    def abort(self, request: Request) -> bool:
        """End a request after its client has disconnected. Legal at any moment."""
        return self.finish(request, FinishReason.ABORT)

    # region exercise 5.1
    def step(self) -> Step | None:
        """Plan, pack and launch steps until as many are in flight as may be, then wait for the oldest and commit it.

        Returns None if there was nothing to run. If the runner raises, the error is passed on, and what was in flight
        is planned again by the next call.
        """
        try:
            while len(self._in_flight) <= self.scheduler.ahead and self._launch():
                pass
            if self._in_flight:
                return self._complete()
        except BaseException:
            self._in_flight.clear()
            self.scheduler.discard_in_flight()
            raise
        events = self.scheduler.drain()
        return Step.empty(events) if events else None

    def _launch(self) -> bool:
        """Plan, pack and launch one step, and note when. False if the plan is empty: nothing is launched."""
        clock, start = self.clock, self.clock()
        batch = self.scheduler.plan(start)
        if not batch:
            return False
        planned = clock()
        packed = self.runner.pack(batch)
        ready = clock()
        pages = self.scheduler.cache.usage.referenced
        launched = self.runner.launch(packed)
        self._in_flight.append(_InFlight(batch, packed, launched, pages, start, planned, ready))
        return True

    def _complete(self) -> Step:
        """Wait for the oldest step in flight and commit it. Returns what it did."""
        batch, _, launched, pages, start, planned, ready = self._in_flight.popleft()
        output = launched.output()
        done = self.clock()
        prefill, decode = tokens_by_kind(batch.slices)
        events = self.scheduler.commit(batch, output, done)
        self.steps += 1
        before, self._ended = self._ended, self.clock()
        spent = Spent(planned - start, ready - planned, done - ready, self._ended - done)
        return Step(batch, prefill, decode, pages, spent, events, self._ended - max(start, before))

    # endregion

    def drain(self) -> list[Event]:
        """Return the events since the last step. For a caller that will not take another one."""
        return self.scheduler.drain()

    def run(self) -> Iterator[Step]:
        """Step until no request is left. The caller may submit and abort between two steps."""
        while self.has_work:
            step = self.step()
            if step is not None:
                yield step


def tokens_by_kind(slices: Sequence[Slice]) -> tuple[int, int]:
    """Count (prefill, decode) tokens of a step before it is committed. A decode is the one newest output token."""
    total = decode = 0
    for request, start, length in slices:
        total += length
        if length == 1 and start >= len(request.prompt_tokens) and start + 1 >= request.total:
            decode += 1
    return total - decode, decode

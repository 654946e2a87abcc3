"""EngineCore: the loop. Plan, pack, run, commit, again and again; and what each step did.

It knows neither models nor time. A runner computes, a clock says when: phase 2's ModelRunner and a real clock make it
an engine, a cost model in the place of both makes it a simulator.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Generic, NamedTuple, Protocol, TypeVar

from phase0_request.batch import Batch, Event, Slice, StepOutput
from phase0_request.request import FinishReason, Request
from phase1_kv_pool.cache import KVCache
from phase5_continuous.deadlines import Deadlines


class Packed(Protocol):
    """A batch made ready: which of its slices complete, and how many there are."""

    @property
    def drawn(self) -> Sequence[int]: ...

    @property
    def slices(self) -> int: ...


class Launched(Protocol):
    """A step that may still be on the device. `output` waits for it."""

    def output(self, numbers: Sequence[int], slices: int, /) -> StepOutput: ...


P = TypeVar("P", bound=Packed)


class Runner(Protocol[P]):
    """What computes: phase 2's ModelRunner is one."""

    def pack(self, batch: Batch) -> P: ...

    def launch(self, step: P) -> Launched: ...


class Decider(Protocol):
    """What plans and commits: Scheduler is one, static batching another."""

    @property
    def cache(self) -> KVCache: ...

    @property
    def ahead(self) -> int: ...

    @property
    def has_work(self) -> bool: ...

    def submit(self, request: Request, deadlines: Deadlines | None = None) -> None: ...

    def finish(self, request: Request, reason: FinishReason, now: float, error: str | None = None) -> bool: ...

    def plan(self, now: float) -> Batch: ...

    def commit(self, batch: Batch, output: StepOutput, now: float) -> list[Event]: ...

    def drain(self) -> list[Event]: ...

    def void(self) -> None: ...


class Spent(NamedTuple):
    """Seconds of a step, by part. `run` is from the launch until its tokens are on the host."""

    plan: float
    pack: float
    run: float
    commit: float


class Step(NamedTuple):
    """What one step did."""

    batch: Batch  # its slices tell where they began; what they complete was to be asked before
    prefill_tokens: int
    decode_tokens: int
    pages: int  # that live requests held while it ran
    spent: Spent
    events: list[Event]


class _InFlight(NamedTuple, Generic[P]):
    batch: Batch
    packed: P
    launched: Launched
    pages: int
    planning: float
    packing: float
    since: float


class EngineCore(Generic[P]):
    """Moves everyone on, a step at a time.

    With a scheduler that runs ahead, a step is launched before the one before it has landed; what `step` returns is of
    the one that landed. The runner must then take tokens from the device that the host does not know yet.
    """

    def __init__(self, scheduler: Decider, runner: Runner[P], clock: Callable[[], float] = time.perf_counter) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self.clock = clock
        self.steps = 0
        self._in_flight: deque[_InFlight[P]] = deque()

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return self.scheduler.has_work

    def submit(self, request: Request, deadlines: Deadlines | None = None) -> None:
        """Let a request wait for its turn. ValueError if it could never have one, QueueFullError if too many wait."""
        self.scheduler.submit(request, deadlines)

    def finish(self, request: Request, reason: FinishReason, error: str | None = None) -> bool:
        """End a request from outside: by a stop string, say. False if it had ended before."""
        return self.scheduler.finish(request, reason, self.clock(), error)

    def abort(self, request: Request) -> bool:
        """Its client has left. Legal at any moment."""
        return self.finish(request, FinishReason.ABORT)

    # region step
    def step(self) -> Step | None:
        """Plan, pack, launch; wait for the oldest step in flight, commit it. None if none has landed: there was nothing
        to run, or it is the first that runs ahead.

        If the runner raises, what was in flight is planned again by the next step, and the error is the caller's.
        """
        try:
            launched = self._launch()
            if len(self._in_flight) > (self.scheduler.ahead if launched else 0):
                return self._land()
        except BaseException:
            self._in_flight.clear()
            self.scheduler.void()
            raise
        events = self.scheduler.drain()
        return Step(Batch(), 0, 0, 0, Spent(0.0, 0.0, 0.0, 0.0), events) if events else None

    def _launch(self) -> bool:
        clock, start = self.clock, self.clock()
        batch = self.scheduler.plan(start)
        if not batch:
            return False
        planned = clock()
        packed = self.runner.pack(batch)
        ready = clock()
        pages = self.scheduler.cache.usage.referenced
        launched = self.runner.launch(packed)
        self._in_flight.append(_InFlight(batch, packed, launched, pages, planned - start, ready - planned, ready))
        return True

    def _land(self) -> Step:
        batch, packed, launched, pages, planning, packing, since = self._in_flight.popleft()
        output = launched.output(packed.drawn, packed.slices)
        landed = self.clock()
        prefill, decode = tokens_by_kind(batch.slices)
        events = self.scheduler.commit(batch, output, landed)
        self.steps += 1
        spent = Spent(planning, packing, landed - since, self.clock() - landed)
        return Step(batch, prefill, decode, pages, spent, events)

    # endregion

    def drain(self) -> list[Event]:
        """What has happened since the last step, for who will not take another."""
        return self.scheduler.drain()

    def run(self) -> Iterator[Step]:
        """Step after step, until everyone has left. Who consumes it may submit and abort between two of them."""
        while self.has_work:
            step = self.step()
            if step is not None:
                yield step


def tokens_by_kind(slices: Sequence[Slice]) -> tuple[int, int]:
    """(prefill, decode) tokens: a decode is the one token after a prompt, asked before the step is committed."""
    total = decode = 0
    for request, start, length in slices:
        total += length
        if length == 1 and start >= len(request.prompt_tokens) and start + 1 >= request.total:
            decode += 1
    return total - decode, decode

"""BaseScheduler: what all schedulers share, above all the commit of a step.

Phase 0's batcher, phase 2's StaticScheduler and phase 5's Scheduler derive from it. They differ in which requests they
plan and in how they manage memory.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection

from phase0_request.batch import Batch, Event, StepOutput, reason_to_finish
from phase0_request.queue import SequenceState, WaitHandle
from phase0_request.request import FinishReason, Request, RequestState


class BaseScheduler(ABC):
    """Owns every live request, from `submit` to its last event.

    A subclass queues requests (`_enqueue`), plans steps (`plan`), removes requests that have ended (`_remove`), and
    starts over after an error (`_clear`). Only a scheduler with a KV cache needs `_publish`.
    """

    ahead = 0  # how many steps may be in flight when another is planned

    def __init__(self, eos_ids: Collection[int] = ()) -> None:
        self.eos_ids = frozenset(eos_ids)
        self._live: dict[str, SequenceState] = {}  # by request id
        self._submitted = 0
        self._events: list[Event] = []

    @property
    def has_work(self) -> bool:
        """Whether there is a live request, or an event to deliver."""
        return bool(self._live or self._events)

    @property
    def sequences(self) -> Collection[SequenceState]:
        """All live requests, and ended ones that are still in flight."""
        return self._live.values()

    @property
    def pages_used(self) -> int:
        """The pages that live requests hold."""
        return 0

    # Requests arrive, and are ended from outside.

    def submit(self, request: Request) -> None:
        """Queue a new request. ValueError if it could never be served, QueueFullError if the queue is at its limit."""
        if request.state is not RequestState.WAITING:
            raise ValueError(f"request {request.id} is {request.state.value}; only a new request can be submitted")
        if request.id in self._live:
            raise ValueError(f"request {request.id} is here already; ids are unique until their request has left")
        sequence = SequenceState(request, (self._rank(request), self._submitted))
        self._enqueue(sequence)
        self._live[request.id] = sequence
        self._submitted += 1

    def finish(self, request: Request, reason: FinishReason, now: float, error: str | None = None) -> bool:
        """End a request from outside, by an abort, a deadline or a stop string, even while its tokens are in flight.
        False if it has already ended, or is unknown here."""
        sequence = self._live.get(request.id)
        if sequence is None or sequence.request is not request or request.finished:
            return False
        self.end(request, reason, now, error)
        return True

    def drain(self) -> list[Event]:
        """Return the events since the last commit or drain, for a caller with no step to commit."""
        events, self._events = self._events, []
        return events

    # Planning and commit.

    @abstractmethod
    def plan(self, now: float) -> Batch:
        """Plan the next step. The batch is empty if no request can take part in one."""

    def commit(self, batch: Batch, output: StepOutput, now: float) -> list[Event]:
        """Apply the output of a step to its requests. Returns all events since the last commit."""
        self._check(batch, output)
        for sequence in batch.sequences:
            sequence.in_flight -= 1
        for number, (request, start, length, beyond) in enumerate(batch.slices):
            if request.state is RequestState.FINISHED:
                continue  # it ended while its step ran: the result is discarded
            if number in output.failed:
                self.end(request, FinishReason.ERROR, now, output.failed[number])
            elif number in output.more:
                sequence = self._live[request.id]
                output.more[number].apply(self, batch.slices[number], now)
                sequence.catch_up()
            else:
                self.advance(request, start, length - len(beyond))
                token = output.tokens[number]
                if token is not None and request.computed == request.total:
                    self.append(request, token, now)
        return self.drain()

    def advance(self, request: Request, start: int, length: int) -> None:
        """Count tokens as computed, and offer them to the cache."""
        request.advance(start, length)
        self._publish(request, length)

    def append(self, request: Request, token: int, now: float, more: object = None, *, predicted: bool = True) -> None:
        """Append an output token, and end the request if it is the last."""
        request.append(token, now, predicted=predicted)
        reason = reason_to_finish(request, self.eos_ids)
        self._events.append(Event(request, token, reason, more))
        if reason is not None:
            self._retire(request, reason, now)

    def block(self, request: Request, until: WaitHandle) -> None:
        """Keep a request out of all steps until this is done."""
        self._live[request.id].block(until)

    def end(self, request: Request, reason: FinishReason, now: float, error: str | None = None) -> None:
        """End a request between two of its tokens, whatever its state."""
        self._events.append(Event(request, None, reason))
        self._retire(request, reason, now, error)

    def discard_in_flight(self) -> None:
        """Forget the steps in flight, because one of them raised. What is committed stands. Since an interrupt may have
        come in the middle of a plan or a commit, all requests are queued again, and those that ran are preempted."""
        self._clear()
        for sequence in [*self._live.values()]:
            request = sequence.request
            if request.finished:
                del self._live[request.id]
                continue
            if request.state is RequestState.RUNNING:
                request.preempt()
            sequence.reset()
            self._enqueue(sequence, again=True)

    def _check(self, batch: Batch, output: StepOutput) -> None:
        """ValueError, before anything has changed, if the output is incomplete."""
        if len(output.tokens) != len(batch):
            raise ValueError(f"the step has {len(batch)} slices, but the output holds {len(output.tokens)} tokens")
        if None in output.tokens:
            for number, (part, token) in enumerate(zip(batch, output.tokens, strict=True)):
                known = number in output.failed or number in output.more or part.request.finished
                if token is None and part.completes and not known:
                    raise ValueError(f"the step gave no token for request {part.request.id}, which it completed")

    def _retire(self, request: Request, reason: FinishReason, now: float, error: str | None = None) -> None:
        sequence = self._live[request.id]
        request.finish(reason, now, error)
        self._remove(sequence)
        if not sequence.in_flight:
            del self._live[request.id]

    # What a subclass decides.

    def _rank(self, request: Request) -> float:
        """The place of a new request: the lower rank goes first, and within a rank the first to arrive."""
        return 0.0

    @abstractmethod
    def _enqueue(self, sequence: SequenceState, again: bool = False) -> None:
        """Queue a new request or, regardless of the queue's limit, one that was here before (`again`)."""

    @abstractmethod
    def _remove(self, sequence: SequenceState) -> None:
        """Remove a request that has ended from its queue, and free what it holds unless a step in flight uses it."""

    @abstractmethod
    def _clear(self) -> None:
        """Empty all queues, and free what the requests hold."""

    def _publish(self, request: Request, length: int) -> None:  # noqa: B027 not abstract: there may be no cache
        """Offer the `length` tokens that a request has just computed to the cache."""

"""Batcher: the scheduler of phase 0. Runs up to `batch_size` requests in every step, first come, first served.

It has the interface of the scheduler in phase 5: `plan` chooses the slices of a step, `commit` applies the results. It
lacks KV cache pages (phase 1), a token budget for a step (phase 3), and preemption (phase 5).
"""

from collections.abc import Collection
from typing import NamedTuple

from phase0_request.batch import Batch, Event, Slice, StepTokens, reason_to_finish
from phase0_request.queue import Key, RequestQueue
from phase0_request.request import FinishReason, Request, RequestState


class WaitingRequest(NamedTuple):
    """A request and its place in the queue: first in, first out within a priority."""

    key: Key
    request: Request


class Batcher:
    """Continuous batching without memory management. Each live request is waiting or running."""

    def __init__(self, eos_ids: Collection[int], batch_size: int = 4, queue_limit: int | None = None) -> None:
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}")
        self.eos_ids = frozenset(eos_ids)
        self.batch_size = batch_size
        self.waiting: RequestQueue[WaitingRequest] = RequestQueue(queue_limit)
        self.running: dict[str, Request] = {}  # by id, in order of admission
        self._entries: dict[str, WaitingRequest] = {}  # by id, of every live request
        self._submitted = 0

    def submit(self, request: Request) -> None:
        """Add a request to the waiting queue. QueueFullError if the queue is full."""
        if request.state is not RequestState.WAITING:
            raise ValueError(f"request {request.id} is {request.state.value}; only a new request can be submitted")
        if request.id in self._entries:
            raise ValueError(f"request {request.id} is here already; ids are unique until their request has left")
        entry = WaitingRequest((request.priority, self._submitted), request)
        self.waiting.add(entry)
        self._entries[request.id] = entry
        self._submitted += 1

    def plan(self, now: float) -> Batch:
        """Admit waiting requests up to `batch_size`, then schedule all missing tokens of the running requests."""
        # region exercise 0.2
        while self.waiting and len(self.running) < self.batch_size:
            request = self.waiting.pop().request
            request.admit(now)
            self.running[request.id] = request
        return Batch(tuple(Slice(r, r.computed, r.total - r.computed) for r in self.running.values()))
        # endregion

    def commit(self, batch: Batch, tokens: StepTokens, now: float) -> list[Event]:
        """Apply the results of a step: advance each request by its slice and append its token. Returns the events."""
        # region exercise 0.4
        for piece, token in zip(batch.slices, tokens, strict=True):  # check the whole step before applying any of it
            if token is None and piece.completes and not piece.request.finished:
                raise ValueError(f"the step gave no token for request {piece.request.id}, which it completed")
        events = []
        for piece, token in zip(batch.slices, tokens, strict=True):
            request = piece.request
            if request.finished:  # aborted while the step ran: its result is dropped
                continue
            request.advance(piece.start, piece.length)
            if token is None or not piece.completes:
                continue
            request.append(token, now)
            reason = reason_to_finish(request, self.eos_ids)
            if reason is not None:
                self._end(request, reason, now)
            events.append(Event(request, token, reason))
        return events
        # endregion

    def finish(self, request: Request, reason: FinishReason, now: float, error: str | None = None) -> bool:
        """End a request from outside a step: abort, error, deadline, stop string. False if it is finished already."""
        if request.finished:
            return False
        self._end(request, reason, now, error)
        return True

    def _end(self, request: Request, reason: FinishReason, now: float, error: str | None = None) -> None:
        request.finish(reason, now, error)
        entry = self._entries.pop(request.id, None)
        if entry is not None and self.running.pop(request.id, None) is None:
            self.waiting.remove(entry)

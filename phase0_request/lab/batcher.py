"""Batcher: phase 0's scheduler. Every step runs everyone who has a seat, and a free seat goes to who waits longest.

It already has the shape of the last one: `plan` says whose tokens, `commit` says what came of it. What it lacks is
memory to give out (phase 1), a bound on the tokens of a step (phase 3), and a memory that runs out (phase 5).
"""

from collections.abc import Collection
from typing import NamedTuple

from phase0_request.batch import Batch, Slice, StepTokens
from phase0_request.events import Event, reason_to_finish
from phase0_request.queue import Key, RequestQueue
from phase0_request.request import FinishReason, Request, RequestState


class Entry(NamedTuple):
    """A request and its place in the queue: first in, first out within a priority."""

    key: Key
    request: Request


class Batcher:
    """Owns every live request: each is in the queue or has one of `batch_size` seats."""

    def __init__(self, eos_ids: Collection[int], batch_size: int = 4, queue_limit: int | None = None) -> None:
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}")
        self.eos_ids = frozenset(eos_ids)
        self.batch_size = batch_size
        self.waiting: RequestQueue[Entry] = RequestQueue(queue_limit)
        self.running: dict[str, Request] = {}  # by id, in order of admission
        self._entries: dict[str, Entry] = {}  # by id, of every live request
        self._submitted = 0

    def submit(self, request: Request) -> None:
        """Let a request wait for its turn. QueueFullError when too many do."""
        if request.state is not RequestState.WAITING:
            raise ValueError(f"request {request.id} is {request.state.value}; only a new request can be submitted")
        if request.id in self._entries:
            raise ValueError(f"request {request.id} is here already; ids are unique until their request has left")
        entry = Entry((request.priority, self._submitted), request)
        self.waiting.add(entry)
        self._entries[request.id] = entry
        self._submitted += 1

    def plan(self, now: float) -> Batch:
        """Seat who waits while there are seats, then let everyone seated catch up. Prompts and decodes share a step."""
        # region exercise 0.3
        while self.waiting and len(self.running) < self.batch_size:
            request = self.waiting.pop().request
            request.admit(now)
            self.running[request.id] = request
        return Batch(tuple(Slice(r, r.computed, r.total - r.computed) for r in self.running.values()))
        # endregion

    def commit(self, batch: Batch, tokens: StepTokens, now: float) -> list[Event]:
        """Move every request of the step on by its slice and its token. One that ended meanwhile takes nothing."""
        for piece, token in zip(batch.slices, tokens, strict=True):  # all of the step, or none of it
            if token is None and piece.completes and not piece.request.finished:
                raise ValueError(f"the step gave no token for request {piece.request.id}, which it completed")
        # region exercise 0.4
        events = []
        for piece, token in zip(batch.slices, tokens, strict=True):
            request = piece.request
            if request.finished:  # aborted while the step ran: what came of it is dropped
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
        """End a request from outside: abort, error, deadline, stop string. False if it had ended before."""
        if request.finished:
            return False
        self._end(request, reason, now, error)
        return True

    def _end(self, request: Request, reason: FinishReason, now: float, error: str | None = None) -> None:
        request.finish(reason, now, error)
        entry = self._entries.pop(request.id, None)
        if entry is not None and self.running.pop(request.id, None) is None:
            self.waiting.remove(entry)

"""Batcher: the simple version of the scheduler. Phase 5 has the one that the server runs.

It runs up to `batch_size` requests in every step, first come, first served. It lacks KV cache pages (phase 1), a token
budget for a step (phase 3), and preemption (phase 5).
"""

from collections.abc import Collection

from phase0_request.batch import Batch, Slice
from phase0_request.queue import RequestQueue, SequenceState
from phase0_request.request import Request
from phase0_request.scheduler import BaseScheduler
from phase0_request.support.checks import check_int


class Batcher(BaseScheduler):
    """Continuous batching without memory management. Each live request is waiting or running."""

    def __init__(self, eos_ids: Collection[int], batch_size: int = 4, queue_limit: int | None = None) -> None:
        super().__init__(eos_ids)
        self.batch_size = check_int("batch_size", batch_size, 1)
        self.waiting = RequestQueue(queue_limit)
        self.running: dict[str, Request] = {}  # by id, in order of admission

    def plan(self, now: float) -> Batch:
        """Admit waiting requests up to `batch_size`, then schedule all missing tokens of the running requests."""
        # region exercise 0.1
        while self.waiting and len(self.running) < self.batch_size:
            request = self.waiting.pop().request
            request.admit(now)
            self.running[request.id] = request
        return Batch(tuple(Slice(r, r.computed, r.total - r.computed) for r in self.running.values()))
        # endregion

    def _rank(self, request: Request) -> float:
        return request.priority

    def _enqueue(self, sequence: SequenceState, again: bool = False) -> None:
        self.waiting.add(sequence, again)

    def _remove(self, sequence: SequenceState) -> None:
        if self.running.pop(sequence.request.id, None) is None:
            self.waiting.remove(sequence)

    def _clear(self) -> None:
        self.running.clear()
        self.waiting.clear()

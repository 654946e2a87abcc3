"""StaticScheduler: the simplest scheduler over a KV cache. It batches statically. The server runs phase 5's."""

from collections.abc import Callable, Collection, Sequence

from phase0_request.batch import Batch, Slice
from phase0_request.queue import RequestQueue, SequenceState
from phase0_request.request import Request
from phase0_request.scheduler import BaseScheduler
from phase0_request.support.checks import check_int
from phase1_kv_pool.cache import PagedCache


def together(running: Sequence[Request]) -> Batch:
    """Plan a step in which every request computes all its pending tokens: its prompt, or its newest token."""
    return Batch(tuple(Slice(r, r.computed, r.total - r.computed) for r in running))


class StaticScheduler(BaseScheduler):
    """Forms a batch of waiting requests, and runs it until the last of them has ended. Then it forms the next one.

    A request is admitted with pages for its longest possible output. So it is never preempted, and most of these pages
    stay empty. `plan_step` chooses the tokens of each step.
    """

    def __init__(
        self,
        cache: PagedCache,
        eos_ids: Collection[int] = (),
        *,
        plan_step: Callable[[Sequence[Request]], Batch] = together,
        batch_size: int = 64,
        queue_limit: int | None = None,
    ) -> None:
        super().__init__(eos_ids)
        self.cache = cache
        self.plan_step = plan_step
        self.batch_size = check_int("batch_size", batch_size, 1)
        self.waiting = RequestQueue(queue_limit)
        self.running: list[SequenceState] = []  # in order of admission

    # region plan
    def plan(self, now: float) -> Batch:
        """Form a batch if none is running, then plan a step for it."""
        if not self.running:
            self.admit(now)
        return self.plan_step([sequence.request for sequence in self.running])

    def admit(self, now: float) -> None:
        """Start waiting requests in order, while there are free places and pages for all tokens that the next one may
        have. Tokens that the cache holds count as computed."""
        cache = self.cache
        while self.waiting and len(self.running) < self.batch_size:
            sequence = next(iter(self.waiting))
            request = sequence.request
            computed = cache.attach(request)
            if not cache.can_grow(request, sequence.longest):
                cache.release(request)
                return
            cache.grow(request, sequence.longest)
            request.admit(now)
            if computed:
                request.advance(0, computed)
            self.running.append(self.waiting.pop())

    # endregion

    @property
    def pages_used(self) -> int:
        return self.cache.usage.referenced

    def _enqueue(self, sequence: SequenceState, again: bool = False) -> None:
        if sequence.longest > self.cache.max_tokens:
            raise ValueError(
                f"{sequence.request.id} may grow to {sequence.longest} tokens, and the pool has room for "
                f"{self.cache.max_tokens}; give the engine a larger cache or the request a smaller max_tokens"
            )
        self.waiting.add(sequence, again)

    def _remove(self, sequence: SequenceState) -> None:
        if sequence in self.running:
            self.running.remove(sequence)
            self.cache.release(sequence.request)
        else:
            self.waiting.remove(sequence)

    def _clear(self) -> None:
        self.running.clear()
        self.waiting.clear()
        self.cache.release_all(sequence.request for sequence in self.sequences)

    def _publish(self, request: Request, length: int) -> None:
        if request.computed % self.cache.page_size < length:  # a page has become full
            self.cache.publish(request)

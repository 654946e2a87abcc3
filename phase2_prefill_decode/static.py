"""StaticScheduler: static batching, the simplest scheduler over a KV cache. The server runs phase 5's."""

from collections.abc import Callable, Collection, Sequence
from typing import TypeVar

from phase0_request.batch import Batch, Slice
from phase0_request.checks import check_int
from phase0_request.queue import Entry, RequestQueue, WaitingRequest
from phase0_request.request import Request, RequestState
from phase0_request.scheduler import BaseScheduler
from phase1_kv_pool.cache import PagedCache

E = TypeVar("E", bound=Entry)


class PagedScheduler(BaseScheduler[E]):
    """A scheduler whose requests hold pages of a KV cache: phase 2's and phase 5's."""

    def __init__(self, cache: PagedCache, eos_ids: Collection[int] = ()) -> None:
        super().__init__(eos_ids)
        self.cache = cache

    @property
    def pages_used(self) -> int:
        return self.cache.usage.referenced

    def _publish(self, request: Request, length: int) -> None:
        if request.computed % self.cache.page_size < length:  # a page has become full
            self.cache.publish(request)


def together(running: Sequence[Request]) -> Batch:
    """Plan a step in which every request computes all its pending tokens: its prompt, or its newest token."""
    return Batch(tuple(Slice(r, r.computed, r.total - r.computed) for r in running))


class StaticScheduler(PagedScheduler[WaitingRequest]):
    """Forms a batch of waiting requests, and runs it until the last of them has ended. Then it forms the next one.

    A request is admitted with pages for the longest output that it may have. So none is ever preempted, and most of
    these pages stay empty. `plan_step` chooses the tokens of each step.
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
        super().__init__(cache, eos_ids)
        self.plan_step = plan_step
        self.batch_size = check_int("batch_size", batch_size, 1)
        self.waiting: RequestQueue[WaitingRequest] = RequestQueue(queue_limit)
        self.running: dict[str, Request] = {}  # by id, in order of admission

    # region plan
    def plan(self, now: float) -> Batch:
        """Form a batch if none is running, then plan a step for it."""
        if not self.running:
            self.admit(now)
        return self.plan_step(list(self.running.values()))

    def admit(self, now: float) -> None:
        """Start waiting requests in order, while there are places, and pages for all tokens that each may have. Those
        that the cache holds count as computed."""
        cache = self.cache
        while self.waiting and len(self.running) < self.batch_size:
            request = next(iter(self.waiting)).request
            computed = cache.attach(request)
            if not cache.can_grow(request, longest(request)):
                cache.release(request)
                return
            cache.grow(request, longest(request))
            request.admit(now)
            if computed:
                request.advance(0, computed)
            self.running[request.id] = self.waiting.pop().request

    # endregion

    def _enqueue(self, request: Request, number: int) -> WaitingRequest:
        if longest(request) > self.cache.max_tokens:
            raise ValueError(
                f"{request.id} may grow to {longest(request)} tokens, and the pool has room for "
                f"{self.cache.max_tokens}; give the engine a larger cache or the request a smaller max_tokens"
            )
        entry = WaitingRequest((0, number), request)
        self.waiting.add(entry)
        return entry

    def _release(self, entry: WaitingRequest, state: RequestState) -> bool:
        if self.running.pop(entry.request.id, None) is not None:
            self.cache.release(entry.request)
        elif entry in self.waiting:
            self.waiting.remove(entry)
        return True


def longest(request: Request) -> int:
    """The most tokens of a request that may be computed: the last one of the output never is."""
    return len(request.prompt_tokens) + request.params.max_tokens - 1

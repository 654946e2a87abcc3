"""StaticBatching: a scheduler that plans as phase 2 does, with arrivals. For comparison with the Scheduler."""

from collections import deque
from collections.abc import Collection

from phase0_request.batch import Batch, Event, Slice, StepOutput, reason_to_finish
from phase0_request.queue import QueueFullError
from phase0_request.request import FinishReason, Request
from phase1_kv_pool.cache import PagedCache


class StaticBatching:
    """Forms a batch of waiting requests when the previous one has ended, and runs it until its last request has ended.

    A request is admitted with pages for the most tokens that it may have. So none is ever preempted, and most of these
    pages stay empty. Deadlines are not supported.
    """

    ahead = 0

    def __init__(
        self, cache: PagedCache, eos_ids: Collection[int] = (), *, batch_size: int = 64, queue_limit: int | None = None
    ) -> None:
        if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
            raise ValueError(f"batch_size must be an integer from 1, got {batch_size!r}")
        self.cache = cache
        self.eos_ids = frozenset(eos_ids)
        self.batch_size = batch_size
        self.queue_limit = queue_limit
        self.waiting: deque[Request] = deque()
        self.running: dict[str, Request] = {}
        self._events: list[Event] = []

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running or self._events)

    def submit(self, request: Request, timeout: float | None = None) -> None:
        if timeout is not None:
            raise ValueError(f"request {request.id}: static batching keeps no deadlines, got a timeout of {timeout}")
        if self._longest(request) > self.cache.max_tokens:
            room = f"the whole cache has room for {self.cache.max_tokens}"
            raise ValueError(f"request {request.id} may grow to {self._longest(request)} tokens, and {room}")
        if self.queue_limit is not None and len(self.waiting) >= self.queue_limit:
            raise QueueFullError(self.queue_limit)
        self.waiting.append(request)

    def finish(self, request: Request, reason: FinishReason, now: float, error: str | None = None) -> bool:
        if request.finished:
            return False
        if self.running.get(request.id) is request:
            self.cache.release(self.running.pop(request.id))
        elif request in self.waiting:
            self.waiting.remove(request)
        else:
            return False
        request.finish(reason, now, error)
        self._events.append(Event(request, None, reason))
        return True

    def drain(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    # region plan
    def plan(self, now: float) -> Batch:
        """Plan the next tokens: whole prompts in the first step of a batch, then one for each running request."""
        if not self.running:
            while self.waiting and len(self.running) < self.batch_size:
                request = self.waiting[0]
                found = self.cache.attach(request)
                if not self.cache.can_grow(request, self._longest(request)):
                    self.cache.release(request)
                    break
                self.cache.grow(request, self._longest(request))
                request.admit(now)
                if found:
                    request.advance(0, found)
                self.running[request.id] = self.waiting.popleft()
        return Batch(tuple(Slice(r, r.computed, r.total - r.computed) for r in self.running.values()))

    # endregion

    def commit(self, batch: Batch, output: StepOutput, now: float) -> list[Event]:
        for number, (piece, token) in enumerate(zip(batch.slices, output.tokens, strict=True)):
            request = piece.request
            if request.finished:
                continue
            request.advance(piece.start, piece.length)
            if number in output.failed or token is None:
                self.finish(request, FinishReason.ERROR, now, output.failed.get(number, "the step gave no token"))
                continue
            if number in output.prompt_logprobs:
                request.add_prompt_logprobs(piece.start, output.prompt_logprobs[number])
            self.cache.publish(request)
            request.append(token, now)
            reason = reason_to_finish(request, self.eos_ids)
            self._events.append(Event(request, token, reason, output.logprobs.get(number)))
            if reason is not None:
                request.finish(reason, now)
                self.cache.release(self.running.pop(request.id))
        return self.drain()

    def discard_in_flight(self) -> None:
        """Nothing to do: `computed` has not changed, so the next plan is the same."""

    def _longest(self, request: Request) -> int:
        return len(request.prompt_tokens) + request.params.max_tokens - 1  # the last token is never computed

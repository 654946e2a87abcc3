"""Scheduler: plans the tokens of the next step, and commits the results of the last. Integers over a PagedCache."""

from collections import deque
from collections.abc import Collection, Iterator
from itertools import chain

from phase0_request.batch import Batch, Event, Forced, Slice, StepOutput, WaitHandle
from phase0_request.checks import check_int, check_number
from phase0_request.request import FinishReason, Request, RequestState
from phase1_kv_pool.cache import PagedCache
from phase2_prefill_decode.static import PagedScheduler
from phase3_chunked_prefill.budget import TokenBudget
from phase3_chunked_prefill.chunker import Chunker
from phase5_continuous.admission import Admission
from phase5_continuous.fairness import FairQueue
from phase5_continuous.policies import FirstComeFirstServed, Policy
from phase5_continuous.running import RunningSet, SequenceState


class Scheduler(PagedScheduler[SequenceState]):
    """Owns every live request. Running ones are scheduled first, then preempted ones resume, then waiting ones start.

    - Running requests share a step as the Chunker splits it: decodes, then prompts, in the order of the policy's ranks.
    - A decode that needs a page when none is free takes it from the last in rank of the tenant that runs the most. That
      one is preempted: its pages are freed (a cache that shares keeps what was computed), and it is the first of its
      tenant to resume. The first in rank is never preempted while it runs, so it ends, and then the next one is first:
      every request ends. One that waits to draw its next token is preempted before others.
    - No waiting request is admitted while a preempted one of its tenant waits for pages.
    - Tenants get equal shares of tokens, places and pages (`fairness`): a tenant that runs far fewer than another may
      take a place from it.
    - `watermark` of the pool, 1 % as in vLLM and rounded down, stays free when a request is admitted, so that those
      that run can grow before one of them must be preempted.

    With `ahead=1`, as the server runs on a GPU, a step may be planned while another is in flight, so that the
    device need not wait for the host. The tokens of that other step are known only to the device. If one of them ends
    its request, the later step has computed that request in vain, and its result is discarded.
    """

    def __init__(
        self,
        cache: PagedCache,
        eos_ids: Collection[int] = (),
        budget: TokenBudget | None = None,
        *,
        policy: Policy | None = None,
        max_running: int = 256,
        watermark: float = 0.01,
        queue_limit: int | None = None,
        ahead: int = 0,
    ) -> None:
        check_int("max_running", max_running, 1)
        check_int("queue_limit", 1 if queue_limit is None else queue_limit, 1)
        check_number("watermark", watermark, 0, 1, below=True)
        check_int("ahead", ahead, 0, 1)
        super().__init__(cache, eos_ids)
        self.chunker = Chunker(budget or TokenBudget(), cache.page_size)
        self.ahead = ahead
        self.running_set = RunningSet(cache, watermark=int(watermark * cache.usage.total) * cache.page_size)
        self.admission = Admission(
            policy or FirstComeFirstServed(),
            self.running_set,
            max_running,
            self.chunker.budget.max_chunk_size,
            FairQueue(queue_limit),
        )
        self._in_flight: deque[tuple[Batch, list[SequenceState]]] = deque()  # oldest first

    @property
    def budget(self) -> TokenBudget:
        """The token budget of a step. A new one holds from the next plan on."""
        return self.chunker.budget

    @budget.setter
    def budget(self, budget: TokenBudget) -> None:
        self.chunker.budget = budget
        self.admission.max_chunk_size = budget.max_chunk_size

    @property
    def is_waiting(self) -> bool:
        """Whether a running request can take part in no step yet, because it could draw no token."""
        return any(sequence.pending is not None for sequence in self.running_set.running)

    @property
    def sequences(self) -> Collection[SequenceState]:
        """All live requests: waiting, running, preempted, or finished in flight."""
        return self._live.values()

    def _enqueue(self, request: Request, number: int) -> SequenceState:
        total = request.total
        if total > self.cache.max_tokens:
            room = f"the whole cache has room for {self.cache.max_tokens}"
            raise ValueError(f"request {request.id} can never be served: its prompt has {total} tokens, and {room}")
        key = (self.admission.policy.rank(request), number)
        sequence = SequenceState(request, key, total, total + request.params.max_tokens)
        self.admission.add(sequence)
        return sequence

    def charge(self, tenant: str, tokens: float) -> None:
        """Charge a tenant for work beside its tokens, in tokens, as long as it has a request here."""
        if tenant in self.admission.share.served:
            self.admission.share.served[tenant] += tokens

    # A step is planned.

    # region exercise 5.4
    def plan(self, now: float) -> Batch:
        """Plan the next step. Empty if there is no request, or if a step in flight must be committed first."""
        if len(self._in_flight) > self.ahead:
            raise RuntimeError(f"{len(self._in_flight)} steps are in flight; commit the oldest before planning another")
        for sequence in self.running_set.running:
            if sequence.pending is not None and not sequence.in_flight and sequence.pending.done():
                sequence.pending = None
        preemptions = self.running_set.num_preemptions
        batch = self._schedule(now)
        while self._live and not self._in_flight and not self.is_waiting:  # nothing could be scheduled
            if self.running_set.num_preemptions == preemptions:  # else a preemption has made room: try again
                self._fail_first(now)
            preemptions = self.running_set.num_preemptions
            batch = self._schedule(now)
        return batch

    def _schedule(self, now: float) -> Batch:
        """Schedule the running requests, then admit others into what is left of the step. Then it is in flight."""
        running_set, admission = self.running_set, self.admission
        admission.make_room()
        waiting = admission.pending_lengths()
        ready = [sequence for sequence in running_set.running if sequence.pending is None]
        step = self.chunker.schedule(ready, waiting, running_set.allocate_slots)
        admission.admit(step, now)
        batch = Batch(tuple(step.slices))
        if step.slices:
            for sequence, part in zip(step.sequences, step.slices, strict=True):
                sequence.schedule(part.length)
            self._in_flight.append((batch, step.sequences))
        return batch

    def _fail_first(self, now: float) -> None:
        """End the first request: it has the whole pool, nothing is in flight, and still its next token does not fit."""
        running_set = self.running_set
        sequence = next(chain(running_set.running, self.admission.in_turn()))
        room = f"the whole cache has room for {self.cache.max_tokens}"
        error = f"out of memory: it needs {sequence.num_tokens} tokens, and {room}"
        self._end(sequence.request, FinishReason.ERROR, now, error)

    # endregion

    # A step has been computed.

    def commit(self, batch: Batch, output: StepOutput, now: float) -> list[Event]:
        """Apply the output of the oldest step in flight. Returns all events since the last commit."""
        events = super().commit(batch, output, now)
        self.running_set.preempt_pending()
        served = self.admission.share.served
        for request, token, _, _ in events:
            if token is not None and request.tenant in served:
                served[request.tenant] += 1
        return events

    # region exercise 5.1
    def _landed(self, batch: Batch) -> Iterator[int]:
        """Take the oldest step out of flight. ValueError if it is another one."""
        if not batch:
            return
        if not self._in_flight or self._in_flight[0][0] is not batch:
            raise ValueError("only the oldest step in flight can be committed, and only once")
        for number, sequence in enumerate(self._in_flight.popleft()[1]):
            sequence.in_flight -= 1
            if sequence.request.state is not RequestState.FINISHED:
                yield number
            elif not sequence.in_flight:  # it ended in flight: its result is discarded
                self.running_set.flush(sequence)
                self._forget(sequence.request)

    def _postpone(self, part: Slice, pending: WaitHandle) -> None:
        """A slice behind it that is in flight too is postponed as well: it has no token to compute."""
        super()._postpone(part, pending)
        request, sequence = part.request, self._live[part.request.id]
        sequence.pending = pending
        sequence.num_scheduled, sequence.num_tokens = request.computed, request.total

    def _append_forced(self, request: Request, forced: Forced, now: float) -> None:
        sequence = self._live[request.id]
        super()._append_forced(request, forced, now)
        sequence.num_tokens = max(sequence.num_tokens, request.total)

    def discard_in_flight(self) -> None:
        """Forget the steps in flight, because one of them raised: they are planned again. What is committed stands.

        Every running request is reset, also if its slice is in no step: an interrupt may have come in the middle of a
        plan or of a commit.
        """
        self._in_flight.clear()
        for sequence in [*self._live.values()]:
            if sequence.request.finished:
                sequence.in_flight = 0
                self.running_set.flush(sequence)
                self._forget(sequence.request)
            elif sequence.request.state is RequestState.RUNNING:
                sequence.reset(capacity=len(self.cache.table(sequence.request)) * self.cache.page_size)
        self.running_set.preempt_pending()

    def _release(self, entry: SequenceState, state: RequestState) -> bool:
        running_set = self.running_set
        if state is RequestState.RUNNING:
            return running_set.finish(entry)  # else it stays known until nothing of it is in flight
        self.admission.queue_of(state).remove(entry)
        running_set.pool_full = False  # it may have been the one that did not fit
        return True

    def _forget(self, request: Request) -> None:
        super()._forget(request)
        self.admission.share.leave(request.tenant)

    # endregion

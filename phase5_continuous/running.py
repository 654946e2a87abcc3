"""The running set: allocates pages to requests, and preempts one when the pool is full or a tenant has too many."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from phase0_request.batch import WaitHandle
from phase0_request.queue import Key, RequestQueue
from phase0_request.request import Request
from phase1_kv_pool.cache import PagedCache
from phase5_continuous.fairness import FairQueue


@dataclass(slots=True, eq=False)
class SequenceState:
    """What the scheduler knows of a live request, from submission until it has ended and nothing of it is in flight.

    A slice counts here as soon as it is scheduled, in the request itself when it is committed. So a step can be planned
    while another is on the device:

        request.computed <= num_scheduled <= num_tokens     computed; computed or in flight; to be computed

    `num_tokens` counts a token that a step in flight will yield as if it were known: computing it is the next slice. It
    never counts the last token that a request may have, since no step computes that one.
    """

    request: Request
    key: Key  # (rank, number of the submission): the order of admission and preemption, fixed for life
    num_tokens: int
    max_total_tokens: int  # where it ends by length
    num_scheduled: int = 0
    capacity: int = 0  # tokens for which it has pages
    in_flight: int = 0  # slices scheduled and not committed
    schedulable: bool = False  # it runs, and its preemption is not pending
    waiting_on: "SequenceState | None" = None  # which computes a prefix that this one needs too
    waiting_until: int = 0  # the length of that prefix
    pending: WaitHandle | None = None  # it could draw no token, and takes part in no step until this is done

    def schedule(self, length: int) -> None:
        """Count a slice of so many tokens as in flight."""
        self.in_flight += 1
        self.num_scheduled += length
        if self.num_scheduled == self.num_tokens and self.num_tokens + 1 < self.max_total_tokens:
            self.num_tokens += 1

    def reset(self, capacity: int) -> None:
        """Count again from what the request has computed: nothing is in flight."""
        request = self.request
        self.num_scheduled, self.num_tokens, self.in_flight = request.computed, request.total, 0
        self.pending = None
        self.capacity = capacity


@dataclass(slots=True)
class RunningSet:
    """The requests that hold pages, and those that lost them.

    A step in flight reads and writes the pages of its requests. So a request that ends while it has a slice in flight
    keeps its pages until that is committed, and so does one that is to be preempted:

        running             holds pages and takes part in steps; for at most one the preemption is pending
        finished in flight  has ended, and holds pages until its last slice is committed
        preempted           holds no pages, and resumes before any waiting request of its tenant is admitted
    """

    cache: PagedCache
    watermark: int  # tokens for which the pool must have room besides, when a request is admitted
    running: RequestQueue[SequenceState] = field(default_factory=RequestQueue)
    preempted: FairQueue[SequenceState] = field(default_factory=FairQueue)
    places: Counter[str] = field(default_factory=Counter)  # running requests, by tenant
    pending_preemption: SequenceState | None = None
    finished_in_flight: int = 0
    pool_full: bool = False  # the last allocation failed, and no pages were freed since
    num_preemptions: int = 0

    # region exercise 5.3
    def allocate(self, sequence: SequenceState, now: float) -> bool:
        """Start or resume a request with pages for all its tokens. False, and nothing has changed, if they do not fit.

        The watermark must stay free, unless no other request holds pages.
        """
        request, cache = sequence.request, self.cache
        cached = cache.attach(request)
        watermark = self.watermark if self.running or self.finished_in_flight else 0
        self.pool_full = not cache.can_grow(request, request.total + watermark)
        if self.pool_full:
            cache.release(request)
            return False
        cache.grow(request, request.total)
        request.admit(now)
        if cached:
            request.advance(0, cached)
        sequence.reset(capacity=len(cache.table(request)) * cache.page_size)
        sequence.schedulable = True
        self.running.add(sequence)
        self.places[request.tenant] += 1
        return True

    def allocate_slots(self, sequences: Sequence[SequenceState]) -> list[SequenceState]:
        """Make sure that the tokens of each have slots. Returns the ones that can be computed in this step."""
        ready = [
            sequence
            for sequence in sequences
            if sequence.schedulable and (sequence.num_tokens <= sequence.capacity or self._append_page(sequence))
        ]
        return [sequence for sequence in ready if sequence.schedulable]  # a later one may have preempted an earlier one

    def _append_page(self, sequence: SequenceState) -> bool:
        """Give a request one more page, or the few that forced tokens need. If the pool is full, preempt others for
        it. False if the request has to wait, or is preempted itself."""
        while not self.cache.can_grow(sequence.request, sequence.num_tokens):
            if self.pending_preemption or self.finished_in_flight or len(self.running) == 1:
                return False  # pages are freed by a commit; or no other request has any
            victim = self.victim
            self.preempt(victim)
            if victim is sequence:
                return False
        self.cache.grow(sequence.request, sequence.num_tokens)
        sequence.capacity = len(self.cache.table(sequence.request)) * self.cache.page_size
        return True

    @property
    def victim(self) -> SequenceState:
        """The request that is preempted next: the last in rank of the tenant that runs the most, of those that wait to
        draw a token if there are any."""
        places = self.places
        return max(self.running, key=lambda each: (places[each.request.tenant], each.pending is not None, each.key))

    def preempt(self, sequence: SequenceState) -> None:
        """Preempt a request: free its pages and keep its tokens. When it resumes, they are prefilled again. With a
        slice in flight, it is preempted once that is committed, and takes no part in steps until then."""
        if sequence.in_flight:
            sequence.schedulable = False
            self.pending_preemption = sequence
            return
        self._remove(sequence)
        sequence.request.preempt()
        sequence.reset(capacity=0)
        self.preempted.add(sequence)
        self.num_preemptions += 1
        self._free(sequence)

    def preempt_pending(self) -> None:
        """Carry out the pending preemption, if nothing of that request is in flight any more."""
        sequence = self.pending_preemption
        if sequence is not None and not sequence.in_flight:
            self.pending_preemption = None
            self.preempt(sequence)

    def finish(self, sequence: SequenceState) -> bool:
        """Remove a running request that has ended. False if it is still in flight, and keeps its pages."""
        self._remove(sequence)
        if self.pending_preemption is sequence:
            self.pending_preemption = None
        if sequence.in_flight:
            self.finished_in_flight += 1
            return False
        self._free(sequence)
        return True

    def flush(self, sequence: SequenceState) -> None:
        """Free the pages of a request that has ended, now that nothing of it is in flight."""
        self.finished_in_flight -= 1
        self._free(sequence)

    def _remove(self, sequence: SequenceState) -> None:
        """Remove a request from the running ones, and count its place as free. A tenant without places has no entry."""
        tenant = sequence.request.tenant
        self.running.remove(sequence)
        sequence.schedulable = False
        self.places[tenant] -= 1
        if not self.places[tenant]:
            del self.places[tenant]

    def _free(self, sequence: SequenceState) -> None:
        """Free the pages of a request. The pool is not known to be full any more."""
        self.cache.release(sequence.request)
        self.pool_full = False

    # endregion

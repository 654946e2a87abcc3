"""The running set: allocates pages to requests, and preempts one when the pool is full."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from phase0_request.queue import RequestQueue, SequenceState
from phase0_request.request import Request
from phase1_kv_pool.cache import PagedCache
from phase5_continuous.turns import Turns


@dataclass(slots=True)
class RunningSet:
    """The requests that hold pages.

    A step in flight reads and writes the pages of its requests. So a request that ends or is preempted while it has a
    slice in flight keeps its pages until that is committed:

        running  holds pages and takes part in steps
        leaving  has ended or is to be preempted, and holds pages until its last slice is committed
    """

    cache: PagedCache
    turns: Turns  # where a preempted request waits
    watermark: int  # tokens for which the pool must still have room after a request is admitted
    running: RequestQueue = field(default_factory=RequestQueue)
    leaving: list[SequenceState] = field(default_factory=list)
    did_not_fit: Request | None = None  # the pool is full: this request got no pages, and none were freed since
    num_preemptions: int = 0
    preempted_for: Request | None = None  # the last preemption was for its pages; None: for a place

    # region exercise 5.2
    def allocate(self, sequence: SequenceState, now: float) -> bool:
        """Start or resume a request with pages for all its tokens. False, and nothing has changed, if they do not fit.

        The watermark must stay free, unless no other request holds pages.
        """
        request, cache = sequence.request, self.cache
        cached = cache.attach(request)
        watermark = self.watermark if self.running or self.leaving else 0
        if not cache.can_grow(request, request.total + watermark):
            cache.release(request)
            self.did_not_fit = request
            return False
        cache.grow(request, request.total)
        request.admit(now)
        if cached:
            request.advance(0, cached)
        sequence.reset(len(cache.table(request)) * cache.page_size)
        self.running.add(sequence)
        return True

    # endregion

    def allocate_slots(self, sequences: Sequence[SequenceState]) -> list[SequenceState]:
        """Find slots for the tokens of each sequence. Returns the sequences that can be computed in this step."""
        for sequence in sequences:
            if sequence.num_tokens > sequence.capacity:
                self._append_page(sequence)
        return [sequence for sequence in sequences if sequence.num_tokens <= sequence.capacity]

    def grow(self, sequence: SequenceState, tokens: int) -> None:
        """Give a request pages for this many tokens. The pages must be available."""
        self.cache.grow(sequence.request, tokens)
        sequence.capacity = len(self.cache.table(sequence.request)) * self.cache.page_size

    # region exercise 5.4
    def _append_page(self, sequence: SequenceState) -> None:
        """Give a request the pages that its tokens need. If the pool is full, preempt others for it, unless a commit is
        about to free pages. A request that the whole pool could not hold gets none, and ends out of memory."""
        while sequence.capacity:  # else it was preempted itself
            if self.cache.can_grow(sequence.request, sequence.num_tokens):
                self.grow(sequence, sequence.num_tokens)
                return
            if self.leaving or len(self.running) == 1 or sequence.num_tokens > self.cache.max_tokens:
                return
            self.preempted_for = sequence.request
            self.leave(self.turns.victim(self.running))

    def leave(self, sequence: SequenceState) -> None:
        """Take a request out of all further steps. Once nothing of it is in flight, its pages are freed if it has
        ended, and otherwise it is preempted."""
        if sequence.capacity:  # else it is leaving already
            self.running.remove(sequence)
            sequence.capacity = 0
            self.leaving.append(sequence)
        if not sequence.in_flight:
            self._free(sequence)

    # endregion

    def free_landed(self) -> list[SequenceState]:
        """Free the pages of leaving requests with nothing left in flight, and return these requests."""
        landed = [sequence for sequence in self.leaving if not sequence.in_flight]
        for sequence in landed:
            self._free(sequence)
        return landed

    def _free(self, sequence: SequenceState) -> None:
        """Free the pages of a leaving request. If it has not ended, it is preempted: its tokens are kept, and prefilled
        again when it resumes."""
        self.leaving.remove(sequence)
        self.cache.release(sequence.request)
        self.did_not_fit = None
        if not sequence.request.finished:
            sequence.request.preempt()
            sequence.reset()
            self.turns.put_back(sequence)
            self.num_preemptions += 1

    def clear(self) -> None:
        self.running.clear()
        self.leaving.clear()
        self.did_not_fit = self.preempted_for = None

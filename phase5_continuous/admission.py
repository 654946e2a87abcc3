"""Admission control: picks waiting requests for the next step."""

from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from operator import attrgetter
from typing import NamedTuple

from phase0_request.queue import RequestQueue, SequenceState
from phase0_request.request import Request, RequestState
from phase1_kv_pool.cache import PagedCache
from phase3_chunked_prefill.budget import StepPlan
from phase5_continuous.extras.fairness import FairQueue, FairShare
from phase5_continuous.policies import Policy
from phase5_continuous.running import RunningSet

CANDIDATES = 8  # requests that are considered in one round: each costs a lookup in the cache
SEARCHED = 256  # and how far down the queue they are looked for, so that a step costs the same however long it is


class Held(NamedTuple):
    """A request that a plan has not admitted, and why:

    tokens      the step's budget is used up
    long        the step has no tokens left for long prompts
    places      as many run as may
    pages       it needs more pages than are available: both
    watermark   the pool has the pages that it needs, but not those that must stay free besides: both
    prefix      another request computes its prefix: that one
    fairness    another tenant is next in turn: that one
    """

    request: Request
    why: str
    more: tuple[int | str | Request, ...] = ()


@dataclass(slots=True)
class Admission:
    """A request is admitted when the step has a token left for it, and the pool can hold all its tokens with the
    watermark free.

    Fair queueing says which tenant is next, and the policy which of its requests; those that were preempted come before
    those that wait. A request that waits for a prefix in progress is passed over, and so is a long prompt when the step
    has no tokens left for long ones: of the first SEARCHED in turn. One that does not fit into the pool is not passed
    by any: pages that become free are kept for it.
    """

    policy: Policy
    running_set: RunningSet
    max_running: int
    max_chunk_size: int  # a prompt with more tokens is long, cached or not: only admission looks it up
    waiting: FairQueue
    share: FairShare = field(default_factory=FairShare)
    prefixes: "PrefixesInProgress" = field(init=False)

    def __post_init__(self) -> None:
        self.prefixes = PrefixesInProgress(self.running_set.cache)

    def add(self, sequence: SequenceState) -> None:
        """Queue a new request. QueueFullError if the queue is at its limit."""
        self.waiting.add(sequence)
        self.share.enter(sequence.request.tenant)
        self.running_set.pool_full = False  # it may come before the one that did not fit

    @property
    def is_open(self) -> bool:
        """Whether a request waits, and there is a place for it and a chance of pages."""
        running_set = self.running_set
        has_place = len(running_set.running) < self.max_running and not running_set.pool_full
        return has_place and bool(running_set.preempted or self.waiting)

    # region exercise 5.2
    def pending_lengths(self) -> list[int]:
        """The tokens of the requests that the next step may admit: of short prompts if there are any."""
        if not self.is_open:
            return []
        candidates = self._candidates(long=False) or self._candidates(long=True)
        return [sequence.num_tokens for sequence in candidates]

    def admit(self, step: StepPlan, now: float) -> None:
        """Add requests to a step in order, as long as there are places, pages and tokens left."""
        admitted = True
        while admitted and self.is_open and step.left:
            admitted = False
            for sequence in self._in_order(self._candidates(long=step.fits_long)):
                if not self.is_open or not step.left:
                    return
                if not step.fit(0, sequence.num_tokens) or self.prefixes.in_progress(sequence):
                    continue
                queue = self.queue_of(sequence)
                if self.running_set.allocate(sequence, now):
                    queue.remove(sequence)
                    self.share.charge(sequence.request.tenant, sequence.num_tokens - sequence.num_scheduled)
                    self.prefixes.add(sequence)
                    step.add_prompt(sequence)
                    admitted = True

    # endregion

    # region exercise 5.6
    def make_room(self) -> None:
        """Preempt a request of the tenant that runs the most, if the next in turn is of a tenant that runs at least two
        fewer, has had fewer tokens, and could not be admitted. One that waits to draw its next token gives its place to
        any request of such a tenant."""
        running_set = self.running_set
        if self.is_open or running_set.leaving or not self._queues:
            return
        victim = running_set.victim
        for sequence in self._candidates(long=True)[:1] if victim.blocked_by is None else self._first_of_each():
            tenant, other = sequence.request.tenant, victim.request.tenant
            fewer = running_set.places[tenant] + 1 < running_set.places[other]
            if fewer and (victim.blocked_by is not None or self.share.served[tenant] < self.share.served[other]):
                running_set.preempted_for = None
                running_set.remove(victim)
                return

    # endregion

    def queue_of(self, sequence: SequenceState) -> FairQueue:
        """The queue of a request that does not run."""
        return self.waiting if sequence.request.times.admitted is None else self.running_set.preempted

    def in_turn(self) -> Iterator[SequenceState]:
        """All requests that do not run, in turn: of a tenant's, those that wait only if none is preempted."""
        return self.share.in_turn(self._queues)

    @property
    def _queues(self) -> dict[str, RequestQueue]:
        waiting, preempted = self.waiting.by_tenant, self.running_set.preempted.by_tenant
        return waiting | preempted if preempted else waiting  # the preempted ones replace the others

    def _first_of_each(self) -> list[SequenceState]:
        """The next request of each tenant."""
        return [next(iter(queue)) for queue in self._queues.values()]

    # region exercise 5.2
    def _candidates(self, long: bool) -> list[SequenceState]:
        """The next requests that do not wait for a prefix, as far as known; with long prompts or without."""
        ready = (
            sequence
            for sequence in islice(self.in_turn(), SEARCHED)
            if (long or sequence.num_tokens <= self.max_chunk_size) and not self.prefixes.known_in_progress(sequence)
        )
        return list(islice(ready, CANDIDATES))

    # endregion

    def _in_order(self, candidates: list[SequenceState]) -> list[SequenceState]:
        """The policy orders the requests of each tenant; the turns of the tenants stay as they are."""
        of_tenant = defaultdict[str, deque[SequenceState]](deque)
        for sequence in sorted(candidates, key=self._place):
            of_tenant[sequence.request.tenant].append(sequence)
        return [of_tenant[sequence.request.tenant].popleft() for sequence in candidates]

    def _place(self, sequence: SequenceState) -> float:
        """The rank of a request, less the head start that it has now. One that resumes has none."""
        rank, _ = sequence.key
        if sequence.request.state is RequestState.PREEMPTED:
            return rank
        return rank - self.policy.head_start(sequence.request, self.running_set.cache)

    # What a plan has left waiting, and why. Changes nothing.

    def held(self, step: StepPlan) -> list[Held]:
        """The next request in turn, and why a plan has not admitted it: the one that did not fit, if there is one. Else
        also the request that is first of all in rank, if another tenant is served before it."""
        if not (queues := self._queues):
            return []
        if self.running_set.pool_full and (request := self.running_set.did_not_fit) is not None:
            return [self._lacking(request)]
        tenant = min(queues, key=self.share.served.__getitem__)
        held = [self._why(next(iter(queues[tenant])), step)]  # which was tried; one with a head start may not have been
        if len(queues) > 1:
            first = min(self._first_of_each(), key=attrgetter("key"))
            if first.request.tenant != tenant:
                held.append(Held(first.request, "fairness", (tenant,)))
        return held

    def _why(self, sequence: SequenceState, step: StepPlan) -> Held:
        """Why a plan has not admitted the next request in turn."""
        running_set, request = self.running_set, sequence.request
        if sequence.waiting_on is not None and self.prefixes.known_in_progress(sequence):
            return Held(request, "prefix", (sequence.waiting_on[0].request,))
        if len(running_set.running) >= self.max_running:
            return Held(request, "places")
        return Held(request, "long" if step.left else "tokens")

    def _lacking(self, request: Request) -> Held:
        needed, available = self.running_set.cache.demand(request, request.total)
        return Held(request, "pages" if needed > available else "watermark", (needed, available))


@dataclass(slots=True)
class PrefixesInProgress:
    """The prompts that are being computed, so that a shared prefix is computed once.

    A request waits on a running one that is about to compute its next page of prompt, until all the pages they have in
    common are cached; it stops waiting if the other one leaves. No request waits if the cache does not share, and none
    waits for pages that it could not use, because its own prompt logprobs are wanted.
    """

    cache: PagedCache
    _sequences: list[SequenceState] = field(default_factory=list)

    def add(self, sequence: SequenceState) -> None:
        """Note an admitted request: its prompt is computed from now on."""
        if self.cache.shares:
            self._sequences = [
                other for other in self._sequences if _will_compute(other, len(other.request.prompt_tokens))
            ]
            self._sequences.append(sequence)

    def in_progress(self, sequence: SequenceState) -> bool:
        """Whether the first page that a request lacks is being computed for another. Notes which one."""
        sequence.waiting_on = self._computed_by(sequence) if self._sequences else None
        return sequence.waiting_on is not None

    def known_in_progress(self, sequence: SequenceState) -> bool:
        """The same as far as it was noted before, without a lookup."""
        return sequence.waiting_on is not None and _will_compute(*sequence.waiting_on)

    def _computed_by(self, sequence: SequenceState) -> tuple[SequenceState, int] | None:
        """The running request that computes the next page of prompt for this one, and the length of what both have."""
        request, page = sequence.request, self.cache.page_size
        prompt, first_page = request.prompt_tokens, request.prompt_tokens[:page]
        alike = [
            other
            for other in self._sequences
            if other.request.prompt_tokens[:page] == first_page and other.request.cache_salt == request.cache_salt
        ]
        if not alike:
            return None
        until = self.cache.cached_tokens(request) + page
        usable = min(len(prompt) - 1, request.cacheable_tokens)  # a request computes its last prompt token itself
        for other in alike:
            theirs = other.request.prompt_tokens
            if until <= usable and _will_compute(other, until) and theirs[:until] == prompt[:until]:
                while until + page <= usable and theirs[until : until + page] == prompt[until : until + page]:
                    until += page
                return other, until
        return None


def _will_compute(sequence: SequenceState, until: int) -> bool:
    """Whether a request runs, and has not computed its first `until` tokens yet."""
    return bool(sequence.capacity) and sequence.blocked_by is None and sequence.request.computed < until

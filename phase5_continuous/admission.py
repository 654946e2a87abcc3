"""Admission control: picks waiting requests for the next step."""

from dataclasses import dataclass, field
from itertools import islice

from phase0_request.queue import SequenceState
from phase0_request.request import RequestState
from phase1_kv_pool.cache import PagedCache
from phase3_chunked_prefill.budget import StepPlan
from phase5_continuous.policies import Policy
from phase5_continuous.running import RunningSet
from phase5_continuous.turns import Turns

CANDIDATES = 8  # requests considered in one round: each costs a lookup in the cache
SEARCHED = 256  # entries of the queue scanned for them, which bounds the cost of a step


@dataclass(slots=True)
class Admission:
    """Admits a request when the step has a token left for it, and the pool can hold all its tokens with the watermark
    free.

    Requests are admitted in turn, and the policy may give a few of them a head start. Among the first SEARCHED in turn,
    a request that waits for a prefix in progress is passed over, and so is a long prompt when the step has no tokens
    left for long ones. No request passes one that does not fit into the pool: pages that become free are kept for it.
    """

    policy: Policy
    turns: Turns
    running_set: RunningSet
    max_running: int
    max_chunk_size: int  # a prompt with more tokens is long, cached or not: only admission looks it up
    prefixes: "PrefixesInProgress" = field(init=False)

    def __post_init__(self) -> None:
        self.prefixes = PrefixesInProgress(self.running_set.cache)

    def add(self, sequence: SequenceState) -> None:
        """Queue a new request. QueueFullError if the queue is at its limit."""
        self.turns.add(sequence)
        self.running_set.did_not_fit = None  # it may come before that one

    @property
    def is_open(self) -> bool:
        """Whether a request is waiting, a place is free, and the pool is not known to be full."""
        has_place = len(self.running_set.running) < self.max_running
        return has_place and self.running_set.did_not_fit is None and bool(self.turns)

    def pending_lengths(self) -> list[int]:
        """The lengths of the prompts that the next step may admit: of the short ones, if any."""
        if not self.is_open:
            return []
        candidates = self._candidates(long=False) or self._candidates(long=True)
        return [sequence.num_tokens for sequence in candidates]

    # region exercise 5.3
    def admit(self, step: StepPlan, now: float) -> None:
        """Add requests to a step in order, as long as there are places, pages and tokens left."""
        admitted = True
        while admitted and self.is_open and step.left:
            admitted = False
            for sequence in self.turns.reorder(self._candidates(long=step.fits_long), self._place):
                if not self.is_open or not step.left:
                    return
                if not step.fit(0, sequence.num_tokens) or self.prefixes.in_progress(sequence):
                    continue
                if self.running_set.allocate(sequence, now):
                    self.turns.remove(sequence)
                    self.prefixes.add(sequence)
                    step.add_prompt(sequence)
                    admitted = True

    # endregion

    def _candidates(self, long: bool) -> list[SequenceState]:
        """The next requests that are not known to wait for a prefix, with long prompts or without."""
        ready = (
            sequence
            for sequence in islice(self.turns.in_turn(), SEARCHED)
            if (long or sequence.num_tokens <= self.max_chunk_size) and not waits_for_prefix(sequence)
        )
        return list(islice(ready, CANDIDATES))

    def _place(self, sequence: SequenceState) -> float:
        """The rank of a request, less its present head start. A resumed request has none."""
        (rank, _), request = sequence.key, sequence.request
        resumes = request.state is RequestState.PREEMPTED
        return rank if resumes else rank - self.policy.head_start(request, self.running_set.cache)

    def make_room(self) -> None:
        """Preempt a request that gives way to one that could not be admitted, if there is one."""
        running_set, turns = self.running_set, self.turns
        if turns and not (self.is_open or running_set.leaving) and (victim := turns.gives_way(running_set.running)):
            running_set.preempted_for = None
            running_set.leave(victim)


@dataclass(slots=True)
class PrefixesInProgress:
    """The prompts that are being computed, so that a shared prefix is computed once.

    A request waits for a running request that is about to compute the next page of its prompt, until all the pages that
    they have in common are cached, or the other request leaves. No request waits if the cache does not share, or for
    pages that it could not use.
    """

    cache: PagedCache
    _sequences: list[SequenceState] = field(default_factory=list)

    def add(self, sequence: SequenceState) -> None:
        """Note that an admitted request's prompt is being computed."""
        if self.cache.shares:
            running = [s for s in self._sequences if _will_compute(s, len(s.request.prompt_tokens))]
            self._sequences = [*running, sequence]

    def in_progress(self, sequence: SequenceState) -> bool:
        """Whether the first page that a request lacks is being computed for another. Notes which one."""
        sequence.waiting_on = self._computed_by(sequence) if self._sequences else None
        return sequence.waiting_on is not None

    def _computed_by(self, sequence: SequenceState) -> tuple[SequenceState, int] | None:
        """The running request that computes this one's next page of prompt, and the length of their common prefix."""
        request, page = sequence.request, self.cache.page_size
        prompt, start = request.prompt_tokens, (request.prompt_tokens[:page], request.cache_salt)
        alike = [s for s in self._sequences if (s.request.prompt_tokens[:page], s.request.cache_salt) == start]
        if not alike:
            return None
        until = self.cache.cached_tokens(request) + page
        usable = min(len(prompt) - 1, request.cacheable_tokens)  # a request computes its last prompt token itself
        for other in alike:
            theirs = other.request.prompt_tokens
            if until <= usable and _will_compute(other, until) and theirs[:until] == prompt[:until]:
                while until + page <= usable and theirs[until : until + page] == prompt[until : until + page]:
                    until += page
                self.cache.awaited(other.request, until)
                return other, until
        return None


def waits_for_prefix(sequence: SequenceState) -> bool:
    """Whether a request is known, without a lookup, to wait for a prefix in progress."""
    return sequence.waiting_on is not None and _will_compute(*sequence.waiting_on)


def _will_compute(sequence: SequenceState, until: int) -> bool:
    """Whether a request is running and has not yet computed its first `until` tokens."""
    return bool(sequence.capacity) and sequence.blocked_by is None and sequence.request.computed < until

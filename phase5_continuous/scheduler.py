"""Scheduler: plans the tokens of the next step, and commits the results of the last. Integers over a PagedCache."""

from collections.abc import Callable, Collection
from itertools import chain
from typing import Protocol

from phase0_request.batch import Batch, Event, Slice, StepOutput
from phase0_request.queue import SequenceState
from phase0_request.request import FinishReason, Request
from phase0_request.scheduler import BaseScheduler
from phase0_request.support.checks import check_int, check_number
from phase1_kv_pool.cache import PagedCache
from phase3_chunked_prefill.budget import StepPlan, TokenBudget
from phase3_chunked_prefill.chunker import Chunker
from phase5_continuous.admission import Admission
from phase5_continuous.policies import FirstComeFirstServed, Policy
from phase5_continuous.running import RunningSet
from phase5_continuous.turns import OneQueue, Turns


class Extender(Protocol):
    """Lengthens slices of a planned step by tokens beyond the newest of their requests."""

    @property
    def counts(self) -> tuple[int, int, tuple[int, ...]]:
        """Since the start: lengthened slices, their added tokens, and how many first, second, ... ones were kept."""

    def extend(self, step: StepPlan, running_set: RunningSet) -> list[Slice]: ...

    def committed(self, batch: Batch, output: StepOutput) -> None:
        """The output of a step is about to be committed."""


class Scheduler(BaseScheduler):
    """Owns every live request. Running ones are scheduled first, then preempted ones resume, then waiting ones start.

    - Running requests share a step as the Chunker splits it: decodes, then prompts, in the order of the policy.
    - A decode that needs a page when none is free takes it from the last request in rank, which is preempted: its pages
      are freed (a cache that shares keeps those that are full), and it is the first to resume. The first in rank is
      never preempted, so it ends, and the next becomes the first: every request ends. Blocked requests are preempted
      before others.
    - No waiting request is admitted while a preempted request waits for pages.
    - `turns` may order requests by more than their rank.
    - `watermark` of the pool, 1 % by default and rounded down, stays free when a request is admitted, so that running
      requests can grow before one of them must be preempted.

    An `extender` may lengthen slices by tokens that the requests do not have yet.

    With `ahead=1`, as the server runs on a GPU, a step may be planned while another is in flight, so that the device
    need not wait for the host. Only the device knows the tokens of that other step. If one of them ends its request,
    the later step has computed one token too many, which is discarded.
    """

    def __init__(
        self,
        cache: PagedCache,
        eos_ids: Collection[int] = (),
        budget: TokenBudget | None = None,
        *,
        policy: Policy | None = None,
        turns: Callable[[int | None], Turns] = OneQueue,
        max_running: int = 256,
        watermark: float = 0.01,
        queue_limit: int | None = None,
        ahead: int = 0,
        extender: Extender | None = None,
    ) -> None:
        check_int("max_running", max_running, 1)
        check_int("queue_limit", 1 if queue_limit is None else queue_limit, 1)
        check_number("watermark", watermark, 0, 1, below=True)
        check_int("ahead", ahead, 0, 1 if extender is None else 0)  # what is beyond the newest token must follow it
        super().__init__(eos_ids)
        self.cache = cache
        self.chunker = Chunker(budget or TokenBudget(), cache.page_size)
        self.ahead = ahead
        self.extender = extender
        self.turns = turns(queue_limit)
        reserved = int(watermark * cache.usage.total / cache.growth) * cache.page_size
        self.running_set = RunningSet(cache, self.turns, reserved)
        self.admission = Admission(
            policy or FirstComeFirstServed(),
            self.turns,
            self.running_set,
            max_running,
            self.chunker.budget.max_chunk_size,
        )

    @property
    def pages_used(self) -> int:
        return self.cache.usage.referenced

    @property
    def budget(self) -> TokenBudget:
        """The token budget of a step. A new budget applies from the next plan on."""
        return self.chunker.budget

    @budget.setter
    def budget(self, budget: TokenBudget) -> None:
        self.chunker.budget = budget
        self.admission.max_chunk_size = budget.max_chunk_size

    @property
    def has_blocked(self) -> bool:
        """Whether a running request is blocked and cannot yet take part in steps."""
        return any(sequence.blocked_by is not None for sequence in self.running_set.running)

    # A step is planned.

    def plan(self, now: float) -> Batch:
        """Plan the next step. Empty if there is no request, or if a step in flight must be committed first."""
        running_set = self.running_set
        for sequence in running_set.running:
            if sequence.blocked_by is not None and not sequence.in_flight and sequence.blocked_by.done():
                sequence.blocked_by = None
        # region exercise 5.1
        preemptions = running_set.num_preemptions
        while not (batch := self._schedule(now)) and self._is_stuck:
            if running_set.num_preemptions == preemptions:  # else a preemption has made room: try again
                self._fail_first(now)
            preemptions = running_set.num_preemptions
        # endregion
        return batch

    def _schedule(self, now: float) -> Batch:
        """Schedule the running requests, then admit others into the rest of the step. Then it is in flight."""
        running_set, admission = self.running_set, self.admission
        admission.make_room()
        # region exercise 5.1
        waiting = admission.pending_lengths()
        ready = [sequence for sequence in running_set.running if sequence.blocked_by is None]
        step = self.chunker.schedule(ready, waiting, running_set.allocate_slots)
        admission.admit(step, now)
        # endregion
        slices = step.slices
        if self.extender is not None:
            step.slices = self.extender.extend(step, running_set)
        for sequence, part in zip(step.sequences, slices, strict=True):
            sequence.schedule(part.length)
        return step

    @property
    def _is_stuck(self) -> bool:
        """Whether no live request can advance: nothing is in flight, and no request is blocked."""
        return bool(self._live) and not any(s.in_flight or s.blocked_by is not None for s in self._live.values())

    def _fail_first(self, now: float) -> None:
        """End the first request: it has the whole pool to itself, and its next token does not fit."""
        running_set = self.running_set
        sequence = next(chain(running_set.running, self.turns.in_turn()))
        room = f"the whole cache has room for {self.cache.max_tokens}"
        error = f"out of memory: it needs {sequence.num_tokens} tokens, and {room}"
        self.end(sequence.request, FinishReason.ERROR, now, error)

    # A step has been computed.

    def commit(self, batch: Batch, output: StepOutput, now: float) -> list[Event]:
        """Apply the output of the oldest step in flight. Returns all events since the last commit."""
        if self.extender is not None:
            self.extender.committed(batch, output)
        events = super().commit(batch, output, now)
        for sequence in self.running_set.free_landed():
            if sequence.request.finished:
                del self._live[sequence.request.id]
        return events

    def plan_again(self) -> None:
        """Forget the steps in flight, between two steps. Running requests keep their pages and committed tokens."""
        for sequence in self.running_set.running:
            sequence.reset(sequence.capacity)
        for sequence in self.running_set.leaving:
            sequence.in_flight = 0
        for sequence in self.running_set.free_landed():
            if sequence.request.finished:
                del self._live[sequence.request.id]

    def _remove(self, sequence: SequenceState) -> None:
        if self.cache.has_table(sequence.request):
            self.running_set.leave(sequence)
        else:
            self.turns.remove(sequence)
            self.running_set.did_not_fit = None  # it may have been that one

    def drain(self) -> list[Event]:
        """Return the events since the last commit or drain, each of them once."""
        events = super().drain()
        self.turns.delivered(events)
        return events

    def _rank(self, request: Request) -> float:
        return self.admission.policy.rank(request)

    def _enqueue(self, sequence: SequenceState, again: bool = False) -> None:
        request, total = sequence.request, sequence.num_tokens
        if again:
            self.turns.put_back(sequence)
            return
        if total > self.cache.max_tokens:
            room = f"the whole cache has room for {self.cache.max_tokens}"
            raise ValueError(f"request {request.id} can never be served: its prompt has {total} tokens, and {room}")
        self.admission.add(sequence)

    def _clear(self) -> None:
        self.running_set.clear()
        self.turns.clear()
        self.cache.release_all(sequence.request for sequence in self.sequences)

    def _publish(self, request: Request, length: int) -> None:
        cache, running_set, size = self.cache, self.running_set, self.cache.page_size
        if request.computed % size >= length:
            return
        usage = cache.usage
        cache.publish(request)  # a page has become full
        other, start = running_set.did_not_fit, (request.computed - length) // size * size
        if other is not None:
            stop = start + size
            is_alike = cache.shares and other.cache_salt == request.cache_salt and other.total > stop
            pieces = (start, stop), (0, start)  # the new page first: most requests differ there
            is_shared = is_alike and all(other.tokens(*piece) == request.tokens(*piece) for piece in pieces)
            if is_shared or cache.usage != usage:  # it was a duplicate
                running_set.did_not_fit = None  # it needs fewer pages now, or there are more

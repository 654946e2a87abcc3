"""Scheduler: plans the tokens of the next step, and commits the results of the last. Integers over a PagedCache."""

from collections import deque
from collections.abc import Collection
from itertools import chain

from phase0_request.batch import Batch, Event, Forced, Slice, StepOutput, WaitHandle, reason_to_finish
from phase0_request.checks import check_int, check_number
from phase0_request.request import FinishReason, Request, RequestState, TokenLogprobs
from phase1_kv_pool.cache import PagedCache
from phase3_chunked_prefill.budget import TokenBudget
from phase3_chunked_prefill.chunker import Chunker
from phase5_continuous.admission import Admission
from phase5_continuous.deadlines import Deadlines
from phase5_continuous.fairness import FairQueue
from phase5_continuous.policies import FirstComeFirstServed, Policy
from phase5_continuous.running import RunningSet, SequenceState


class Scheduler:
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
        self.cache = cache
        self.eos_ids = frozenset(eos_ids)
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
        self._deadlines = Deadlines()
        self._sequences: dict[str, SequenceState] = {}  # by request id
        self._submitted = 0
        self._in_flight: deque[tuple[Batch, list[SequenceState]]] = deque()  # oldest first
        self._events: list[Event] = []

    @property
    def budget(self) -> TokenBudget:
        """The token budget of a step. A new one holds from the next plan on."""
        return self.chunker.budget

    @budget.setter
    def budget(self, budget: TokenBudget) -> None:
        self.chunker.budget = budget
        self.admission.max_chunk_size = budget.max_chunk_size

    @property
    def has_work(self) -> bool:
        """Whether there is a live request, or an event to deliver."""
        return bool(self._sequences or self._events)

    @property
    def is_waiting(self) -> bool:
        """Whether a running request can take part in no step yet, because it could draw no token."""
        return any(sequence.pending is not None for sequence in self.running_set.running)

    @property
    def sequences(self) -> Collection[SequenceState]:
        """All live requests: waiting, running, preempted, or finished in flight."""
        return self._sequences.values()

    # Requests arrive, and are ended from outside.

    def submit(self, request: Request, timeout: float | None = None) -> None:
        """Queue a request, which ends at the latest `timeout` seconds after its arrival. ValueError if it could never
        be served, QueueFullError if the queue is at its limit."""
        if timeout is not None:
            check_number(f"request {request.id}: timeout", timeout, 0, above=True)
        if request.state is not RequestState.WAITING:
            raise ValueError(f"request {request.id} is {request.state.value}; only a new request can be submitted")
        if request.id in self._sequences:
            raise ValueError(f"request {request.id} is here already; ids are unique until their request has left")
        total = request.total
        if total > self.cache.max_tokens:
            room = f"the whole cache has room for {self.cache.max_tokens}"
            raise ValueError(f"request {request.id} can never be served: its prompt has {total} tokens, and {room}")
        key = (self.admission.policy.rank(request), self._submitted)
        sequence = SequenceState(request, key, total, total + request.params.max_tokens)
        self.admission.add(sequence)
        self._submitted += 1
        self._sequences[request.id] = sequence
        if timeout is not None:
            self._deadlines.set(sequence, timeout)

    def finish(self, request: Request, reason: FinishReason, now: float, error: str | None = None) -> bool:
        """End a request from outside: by an abort or a stop string, say, also while its tokens are in flight. False if
        it had ended before, or is not known here."""
        sequence = self._sequences.get(request.id)
        if sequence is None or sequence.request is not request or request.finished:
            return False
        self._finish(sequence, reason, now, error)
        return True

    def drain(self) -> list[Event]:
        """Return the events since the last commit or drain. For when there is no step to commit."""
        events, self._events = self._events, []
        return events

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
        for sequence in self._deadlines.due(now):
            self._finish(sequence, FinishReason.TIMEOUT, now)
        for sequence in self.running_set.running:
            if sequence.pending is not None and not sequence.in_flight and sequence.pending.done():
                sequence.pending = None
        preemptions = self.running_set.num_preemptions
        batch = self._schedule(now)
        while self._sequences and not self._in_flight and not self.is_waiting:  # nothing could be scheduled
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
            for sequence, piece in zip(step.sequences, step.slices, strict=True):
                sequence.schedule(piece.length)
            self._in_flight.append((batch, step.sequences))
        return batch

    def _fail_first(self, now: float) -> None:
        """End the first request: it has the whole pool, nothing is in flight, and still its next token does not fit."""
        running_set = self.running_set
        sequence = next(chain(running_set.running, self.admission.in_turn()))
        room = f"the whole cache has room for {self.cache.max_tokens}"
        error = f"out of memory: it needs {sequence.num_tokens} tokens, and {room}"
        self._finish(sequence, FinishReason.ERROR, now, error)

    # A step has been computed.

    def commit(self, batch: Batch, output: StepOutput, now: float) -> list[Event]:
        """Apply the output of the oldest step in flight. Returns all events since the last commit."""
        sequences = self._check_output(batch, output)
        failed, prompt_logprobs = output.failed, output.prompt_logprobs
        for number, sequence in enumerate(sequences):
            sequence.in_flight -= 1
            if sequence.request.finished:  # it ended in flight: its result is discarded
                if not sequence.in_flight:
                    self.running_set.flush(sequence)
                    self._forget(sequence)
                continue
            if number in failed:
                self._finish(sequence, FinishReason.ERROR, now, failed[number])
                continue
            if number in prompt_logprobs:
                sequence.request.add_prompt_logprobs(batch.slices[number].start, prompt_logprobs[number])
            if number in output.late:
                self._postpone(sequence, batch.slices[number], output.late[number])
                continue
            self._advance(sequence, batch.slices[number], number, output, now)
        self.running_set.preempt_pending()
        return self.drain()

    def _check_output(self, batch: Batch, output: StepOutput) -> list[SequenceState]:
        """Take the oldest step out of flight. ValueError if it is another one, or if its output is not complete."""
        if len(output.tokens) != len(batch):
            raise ValueError(f"the step has {len(batch)} slices, and {len(output.tokens)} tokens came of it")
        if not batch:
            return []
        if not self._in_flight or self._in_flight[0][0] is not batch:
            raise ValueError("only the oldest step in flight can be committed, and only once")
        if None in output.tokens:
            for number, (piece, token) in enumerate(zip(batch, output.tokens, strict=True)):
                known = number in output.failed or number in output.late or piece.request.finished
                if token is None and piece.completes and not known:
                    raise ValueError(f"the step gave no token for request {piece.request.id}, which it completed")
        return self._in_flight.popleft()[1]

    def _advance(self, sequence: SequenceState, piece: Slice, number: int, output: StepOutput, now: float) -> None:
        """Advance a request by a computed slice, and append its next token if the slice completes it."""
        request, token = sequence.request, output.tokens[number]
        request.advance(piece.start, piece.length)
        if request.computed % self.cache.page_size < piece.length:  # a page has become full
            self.cache.publish(request)
        if token is None or request.computed < request.total:
            return
        self._append(sequence, token, now, output.logprobs.get(number))
        forced = output.forced.get(number)
        if forced is not None:
            self._append_forced(sequence, forced, now)

    def _postpone(self, sequence: SequenceState, piece: Slice, pending: WaitHandle) -> None:
        """Have the last token of a slice computed again, when a token can be drawn after it. A slice behind it that is
        in flight too is postponed as well: it has no token to compute."""
        request = sequence.request
        if piece.start == request.computed and piece.length > 1:
            request.advance(piece.start, piece.length - 1)
            self.cache.publish(request)
        sequence.pending = pending
        sequence.num_scheduled, sequence.num_tokens = request.computed, request.total

    def _append_forced(self, sequence: SequenceState, forced: Forced, now: float) -> None:
        """Append the tokens that a grammar forces. They are one slice: prefilled together, not decoded one by one."""
        for token in forced.tokens:
            if not sequence.request.finished:
                self._append(sequence, token, now, forced=True)
        sequence.num_tokens = max(sequence.num_tokens, sequence.request.total)
        if forced.ends and not sequence.request.finished:
            self._finish(sequence, FinishReason.STOP, now)

    def _append(
        self,
        sequence: SequenceState,
        token: int,
        now: float,
        logprobs: TokenLogprobs | None = None,
        forced: bool = False,
    ) -> None:
        """Append an output token, and end the request if it is the last."""
        request = sequence.request
        request.append(token, now, forced=forced)
        self.admission.share.served[request.tenant] += 1
        reason = reason_to_finish(request, self.eos_ids)
        self._events.append(Event(request, token, reason, logprobs))
        if reason is not None:
            request.finish(reason, now)
            if self.running_set.finish(sequence):
                self._forget(sequence)

    def discard_in_flight(self) -> None:
        """Forget the steps in flight, because one of them raised: they are planned again. What is committed stands.

        Every running request is reset, also if its slice is in no step: an interrupt may have come in the middle of a
        plan or of a commit.
        """
        self._in_flight.clear()
        for sequence in [*self._sequences.values()]:
            if sequence.request.finished:
                sequence.in_flight = 0
                self.running_set.flush(sequence)
                self._forget(sequence)
            elif sequence.request.state is RequestState.RUNNING:
                sequence.reset(capacity=len(self.cache.table(sequence.request)) * self.cache.page_size)
        self.running_set.preempt_pending()

    def _finish(self, sequence: SequenceState, reason: FinishReason, now: float, error: str | None = None) -> None:
        """End a request between two of its tokens, in whichever state it is."""
        request, running_set = sequence.request, self.running_set
        queue = self.admission.queue_of(sequence)
        runs = request.state is RequestState.RUNNING
        request.finish(reason, now, error)
        self._events.append(Event(request, None, reason))
        if runs:
            if not running_set.finish(sequence):
                return  # it stays known until nothing of it is in flight
        else:
            queue.remove(sequence)
            running_set.pool_full = False  # it may have been the one that did not fit
        self._forget(sequence)

    def _forget(self, sequence: SequenceState) -> None:
        """Forget a request that has ended and has nothing in flight."""
        del self._sequences[sequence.request.id]
        self.admission.share.leave(sequence.request.tenant)

    # endregion

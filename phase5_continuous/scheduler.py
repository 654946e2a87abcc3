"""Scheduler: whose tokens are computed next, and what came of the last ones. Integers over a KVCache."""

from collections import deque
from collections.abc import Collection
from itertools import chain

from phase0_request.batch import Batch, Event, Slice, StepOutput, reason_to_finish
from phase0_request.request import FinishReason, Request, RequestState, TokenLogprobs
from phase1_kv_pool.cache import KVCache
from phase3_chunked_prefill.budget import TokenBudget
from phase3_chunked_prefill.chunker import Chunker
from phase5_continuous.admission import Admission
from phase5_continuous.deadlines import Alarms, Deadlines
from phase5_continuous.policies import FirstComeFirstServed, Policy
from phase5_continuous.residents import Residents
from phase5_continuous.seat import Line, Seat


class Scheduler:
    """Owns every live request. Running ones go first, then those that were preempted, then those that wait.

    - Running: decodes, then prompts, as the Chunker shares a step among them, in the order of the policy's ranks.
    - A decode that needs a page when none is left takes it from the last in rank, which is preempted: its pages are
      released (a cache that shares keeps what was computed), and it is the first to come back. The first in rank is
      never preempted, so it ends, and then the next is first: everyone ends.
    - Admitted is who has a token in the step, and pages for all its known tokens with `watermark` of the pool to spare
      for those who run; alone, without. While one that was preempted waits, nobody new is admitted.

    With `ahead=1` a step may be planned while another is on the device, which then need not wait for the host. The
    tokens of that other are known only there: a request that ends by one of them is in the later step for nothing, and
    what comes of it is discarded.
    """

    def __init__(
        self,
        cache: KVCache,
        eos_ids: Collection[int] = (),
        budget: TokenBudget | None = None,
        *,
        policy: Policy | None = None,
        max_running: int = 256,
        watermark: float = 0.01,
        queue_limit: int | None = None,
        deadlines: Deadlines | None = None,
        ahead: int = 0,
    ) -> None:
        for name, value in (("max_running", max_running), ("queue_limit", 1 if queue_limit is None else queue_limit)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be an integer from 1, got {value!r}")
        if isinstance(watermark, bool) or not isinstance(watermark, int | float) or not 0 <= watermark < 1:
            raise ValueError(f"watermark must be a share of the pool, from 0 to below 1, got {watermark!r}")
        if isinstance(ahead, bool) or ahead not in (0, 1):
            raise ValueError(f"ahead must be 0 or 1 steps, got {ahead!r}")
        self.cache = cache
        self.eos_ids = frozenset(eos_ids)
        self.chunker = Chunker(budget or TokenBudget(), cache.page_size)
        self.deadlines = deadlines or Deadlines()
        self.ahead = ahead
        self.residents = Residents(cache, spare=int(watermark * cache.usage.total) * cache.page_size)
        max_chunk = self.chunker.budget.max_chunk_size
        self.admission = Admission(
            policy or FirstComeFirstServed(), self.residents, max_running, max_chunk, queue_limit
        )
        self._alarms = Alarms()
        self._seats: dict[str, Seat] = {}  # by request id, everyone of whom anything is left
        self._submitted = 0
        self._in_flight: deque[tuple[Batch, list[Seat]]] = deque()  # oldest first
        self._events: list[Event] = []

    @property
    def has_work(self) -> bool:
        """Whether anyone is here, or an event waits to be delivered."""
        return bool(self._seats or self._events)

    @property
    def seats(self) -> Collection[Seat]:
        """Everyone of whom anything is left: who waits, runs, was preempted, or has ended and has yet to land."""
        return self._seats.values()

    # Requests come, and are ended from outside.

    def submit(self, request: Request, deadlines: Deadlines | None = None) -> None:
        """Let a request wait for its turn. ValueError if it could never have one, QueueFullError if too many wait."""
        if request.state is not RequestState.WAITING:
            raise ValueError(f"request {request.id} is {request.state.value}; only a new request can be submitted")
        if request.id in self._seats:
            raise ValueError(f"request {request.id} is here already; ids are unique until their request has left")
        total = request.total
        if total > self.cache.max_tokens:
            room = f"the whole cache has room for {self.cache.max_tokens}"
            raise ValueError(f"request {request.id} can never be served: its prompt has {total} tokens, and {room}")
        rank = self.admission.policy.rank(request)
        seat = Seat(request, (rank, self._submitted), total, total + request.params.max_tokens)
        self.admission.wait(seat)
        self._submitted += 1
        self._seats[request.id] = seat
        self._alarms.set(seat, deadlines or self.deadlines)

    def finish(self, request: Request, reason: FinishReason, now: float, error: str | None = None) -> bool:
        """End a request from outside: by a stop string, say. False if it had ended before, or was never here."""
        seat = self._seats.get(request.id)
        if seat is None or seat.request is not request or request.finished:
            return False
        self._end(seat, reason, now, error)
        return True

    def abort(self, request: Request, now: float) -> bool:
        """Its client has left. Legal in every state, also while its tokens are in flight."""
        return self.finish(request, FinishReason.ABORT, now)

    def drain(self) -> list[Event]:
        """What has happened since the last commit or drain. For when there is no step to commit."""
        events, self._events = self._events, []
        return events

    # A step is planned.

    def plan(self, now: float) -> Batch:
        """The next step. Empty if a step in flight must be committed first for anyone to move on, or nobody is here."""
        if len(self._in_flight) > self.ahead:
            raise RuntimeError(f"{len(self._in_flight)} steps are in flight; commit the oldest before planning another")
        for seat in self._alarms.due(now):
            self._end(seat, FinishReason.TIMEOUT, now)
        preempted = self.residents.preemptions
        slices, seats = self._fill(now)
        while not slices and not self._in_flight and self._seats:
            if self.residents.preemptions == preempted:  # else there is room now for those whose turn it was not
                self._give_up(now)
            preempted = self.residents.preemptions
            slices, seats = self._fill(now)
        batch = Batch(tuple(slices))
        if slices:
            self._in_flight.append((batch, seats))
        return batch

    def _fill(self, now: float) -> tuple[list[Slice], list[Seat]]:
        """The slices of a step, and whose they are."""
        slices: list[Slice] = []
        seats: list[Seat] = []
        decodes: list[Seat] = []
        prompts: list[Seat] = []
        for seat in self.residents.running:
            pending = seat.known - seat.planned
            if pending == 1:
                decodes.append(seat)
            elif pending:
                prompts.append(seat)
        wanted = chain((seat.known - seat.planned for seat in prompts), self.admission.wanted())
        share = self.chunker.begin(len(decodes), wanted)
        for seat in self.chunker.turns(decodes, share.decodes):
            if seat.stays and (seat.planned < seat.room or self.residents.extend(seat)):
                slices.append(Slice(seat.request, seat.planned, 1))
                seats.append(seat)
                seat.plan(1)
        for seat in chain((seat for seat in prompts if seat.stays), self.admission.admit(share, now)):
            pending = seat.known - seat.planned
            length = share.offer(seat.planned, pending)
            if length:
                share.take(pending, length)
                slices.append(Slice(seat.request, seat.planned, length))
                seats.append(seat)
                seat.plan(length)
        return slices, seats

    def _give_up(self, now: float) -> None:
        """Nothing is in flight and nobody can move on: whoever is first has the whole pool, and it is too small."""
        lines = self.residents.running, self.residents.preempted, self.admission.waiting
        seat = next(seat for line in lines for seat in line)
        room = f"the whole cache has room for {self.cache.max_tokens}"
        self._end(seat, FinishReason.ERROR, now, f"out of memory: it needs {seat.known} tokens, and {room}")

    # A step has been computed.

    def commit(self, batch: Batch, output: StepOutput, now: float) -> list[Event]:
        """Move the requests of the oldest step in flight on. Returns all that has happened since the last commit."""
        for number, seat in enumerate(self._landed(batch, output)):
            # region exercise 5.5
            seat.in_flight -= 1
            if seat.request.finished:  # while this was in flight: nothing comes of it
                if not seat.in_flight:
                    self.residents.land(seat)
                    del self._seats[seat.request.id]
                continue
            # endregion
            if number in output.failed:
                self._end(seat, FinishReason.ERROR, now, output.failed[number])
            else:
                if number in output.prompt_logprobs:
                    seat.request.add_prompt_logprobs(batch.slices[number].start, output.prompt_logprobs[number])
                self._advance(seat, batch.slices[number], output.tokens[number], output.logprobs.get(number), now)
        self.residents.let_go()
        return self.drain()

    def _landed(self, batch: Batch, output: StepOutput) -> list[Seat]:
        """Whose slices a step was, if it is the oldest in flight and all of it is there; else a ValueError."""
        if len(output.tokens) != len(batch):
            raise ValueError(f"the step has {len(batch)} slices, and {len(output.tokens)} tokens came of it")
        if not batch:
            return []
        if not self._in_flight or self._in_flight[0][0] is not batch:
            raise ValueError("only the oldest step in flight can be committed, and only once")
        if None in output.tokens:
            for number, (piece, token) in enumerate(zip(batch, output.tokens, strict=True)):
                if token is None and piece.completes and number not in output.failed and not piece.request.finished:
                    raise ValueError(f"the step gave no token for request {piece.request.id}, which it completed")
        return self._in_flight.popleft()[1]

    def _advance(self, seat: Seat, piece: Slice, token: int | None, logprobs: TokenLogprobs | None, now: float) -> None:
        """A slice has been computed, and the next token with it if it completes its request."""
        request = seat.request
        # region exercise 5.3
        request.advance(piece.start, piece.length)
        if request.computed % self.cache.page_size < piece.length:  # a page has become full
            self.cache.publish(request)
        if token is None or request.computed < request.total:
            return
        request.append(token, now)
        reason = reason_to_finish(request, self.eos_ids)
        self._events.append(Event(request, token, reason, logprobs))
        # endregion
        if reason is not None:
            request.finish(reason, now)
            self._leave(seat, self.residents.running)

    def void(self) -> None:
        """What is in flight is lost, because a step raised: forget it, to plan it again. What is committed stands.

        Whoever runs is caught up with what is computed of it, also if its slice is in no step: an interrupt may have
        come among the slices of a plan or a commit.
        """
        self._in_flight.clear()
        for seat in [*self._seats.values()]:
            if seat.request.finished:
                seat.in_flight = 0
                self.residents.land(seat)
                del self._seats[seat.request.id]
            elif seat.request.state is RequestState.RUNNING:
                seat.catch_up(len(self.cache.table(seat.request)) * self.cache.page_size)
        self.residents.let_go()

    # A request leaves.

    def _end(self, seat: Seat, reason: FinishReason, now: float, error: str | None = None) -> None:
        """End a request between two of its tokens."""
        line = self._line(seat)
        seat.request.finish(reason, now, error)
        self._events.append(Event(seat.request, None, reason))
        self._leave(seat, line)

    def _leave(self, seat: Seat, line: Line) -> None:
        if line is not self.residents.running:
            line.remove(seat)
            self.residents.full = False  # it may have been the one that did not fit
        elif not self.residents.end(seat):
            return  # it is forgotten when what is in flight of it has landed
        del self._seats[seat.request.id]

    def _line(self, seat: Seat) -> Line:
        """Where a live request is."""
        lines = {RequestState.RUNNING: self.residents.running, RequestState.PREEMPTED: self.residents.preempted}
        return lines.get(seat.request.state, self.admission.waiting)

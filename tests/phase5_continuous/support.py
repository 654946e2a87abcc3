"""A device that computes hashes. Each token it yields depends on all tokens before it, read through the page table from
their slots. So a wrong table, a page freed too early or a token computed twice changes the output of a request."""

import zlib
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from phase0_request import Batch, Event, FinishReason, Request, SamplingParams, StepOutput
from phase0_request.core import EngineCore
from phase0_request.request import RequestState
from phase1_kv_pool import PagedCache
from phase2_prefill_decode.extras.outcome import Forced, Verified, outcome_of
from phase5_continuous.extras.fairness import FairQueues, FairShare
from phase5_continuous.extras.invariants import check
from phase5_continuous.extras.speculation.draft_model import CATCH_UP, DraftModel
from phase5_continuous.extras.speculation.speculation import speculation_in
from phase5_continuous.scheduler import Scheduler

EOS = (0, 1, 2, 3, 4)
VOCABULARY = 40
ENDLESS = 10_000  # steps: no test needs as many


def mix(state: int, token: int) -> int:
    """The value that a slot holds: it depends on its token and, through the slot before, on all earlier ones."""
    return zlib.crc32(b"%d %d" % (state, token))


Forces = Callable[[int], Forced]  # what follows a drawn token in any case


def nothing(token: int) -> Forced:
    return Forced()


def alone(request: Request, eos_ids: Collection[int], forces: Forces = nothing) -> tuple[list[int], FinishReason]:
    """The output of a request that is served alone, and its finish reason."""
    params, state, seen, output = request.params, 1, 0, list[int]()
    for token in request.prompt_tokens:
        state = mix(state, token)
        seen += state
    while True:
        forced = forces(seen % VOCABULARY)
        for token in (seen % VOCABULARY, *forced.tokens):
            output.append(token)
            may_stop = len(output) > params.min_tokens and not params.ignore_eos
            if may_stop and token in eos_ids:
                return output, FinishReason.STOP
            if len(output) == params.max_tokens:
                return output, FinishReason.LENGTH
            state = mix(state, token)
            seen += state
        if forced.ends:
            return output, FinishReason.STOP


@dataclass
class PackedBatch:
    """What a runner makes of a batch, for those that compute nothing."""

    batch: Batch


@dataclass
class Launched:
    """A slice as it was sent to the device: the tokens that the host knew then, and the slots."""

    request: Request
    start: int
    tokens: list[int | None]  # None: the device itself knows it
    slots: list[int]  # of all tokens up to the slice's end
    draws: int  # how many tokens it yields: one more than it has drafts, if it completes its request


@dataclass
class Device:
    """Runs steps in the order of their launch, each as late as possible: when its output is fetched."""

    cache: PagedCache
    memory: dict[int, int] = field(default_factory=dict)
    latest: dict[str, int] = field(default_factory=dict)
    steps: deque[list[Launched]] = field(default_factory=deque)
    verified: dict[int, list[Verified]] = field(default_factory=dict)  # of the step that landed last

    def launch(self, batch: Batch) -> None:
        step: list[Launched] = []
        for request, start, length, beyond in batch.slices:
            stop, size, table = start + length, self.cache.page_size, self.cache.table(request)
            known: list[int | None] = [*request.tokens(0, request.total), *beyond][start:stop]
            slots = [table[position // size] * size + position % size for position in range(stop)]
            assert slots[start:] == self.cache.slots(batch.slices[len(step)])
            known += [None] * (length - len(known))
            assert not beyond or stop == request.total + len(beyond)
            draws = min(1 + len(beyond), length) if stop >= request.total else 0
            step.append(Launched(request, start, known, slots, draws))
        self.steps.append(step)

    def land(self) -> list[int | None]:
        self.verified, tokens = {}, list[int | None]()
        for number, piece in enumerate(self.steps.popleft()):
            first, *others = self._run(piece) or [None]
            tokens.append(first)
            drafts = piece.tokens[len(piece.tokens) - len(others) :]
            right = next((place for place, draft in enumerate(drafts) if draft != [first, *others][place]), len(others))
            if right:
                self.verified[number] = [Verified(token) for token in others[:right] if token is not None]
        return tokens

    def _run(self, piece: Launched) -> list[int | None]:
        name = piece.request.id
        states = [self.memory[slot] for slot in piece.slots[: piece.start]]
        for token, slot in zip(piece.tokens, piece.slots[piece.start :], strict=True):
            states.append(mix(states[-1] if states else 1, self.latest[name] if token is None else token))
            self.memory[slot] = states[-1]
        if not piece.draws:
            return []
        self.latest[name] = sum(states) % VOCABULARY
        return [sum(states[: len(states) + 1 - left]) % VOCABULARY for left in range(piece.draws, 0, -1)]

    @property
    def pages_in_flight(self) -> set[int]:
        return {slot // self.cache.page_size for step in self.steps for piece in step for slot in piece.slots}


@dataclass
class Oracle:
    """Proposes what a request says when it is served alone: all of it, or with a wrong token somewhere."""

    outputs: dict[str, tuple[list[int], FinishReason]] = field(default_factory=dict)

    def propose(self, request: Request, most: int) -> list[int]:
        done = len(request.output_tokens)
        draft = (self.outputs[request.id][0][done:] + [VOCABULARY - 1] * most)[:most]  # also past a token that ends it
        wrong = mix(done, len(request.prompt_tokens)) % (most + 2)
        if wrong < most:
            draft[wrong] += 1
        return draft


class DraftRunner:
    """Runs the steps of a draft model, which computes the same hashes: each token must follow from all those before.
    Now and then it yields another one than it has drawn."""

    def __init__(self, cache: PagedCache) -> None:
        self.device = Device(cache)
        self.batch = Batch()
        self.longest = 0  # tokens of a sequence

    def pack(self, batch: Batch) -> Batch:
        assert batch.num_tokens <= CATCH_UP
        return batch

    def launch(self, batch: Batch) -> "DraftRunner":
        self.device.launch(batch)
        self.batch, self.longest = batch, max(self.longest, *(part.stop for part in batch))
        return self

    def output(self) -> StepOutput:
        tokens = self.device.land()
        for number, (part, token) in enumerate(zip(self.batch, tokens, strict=True)):
            if token is not None:
                tokens_of = [*part.request.tokens(0, part.request.total), *part.beyond][: part.stop]
                states = [*accumulate(tokens_of, mix, initial=1)]
                assert token == sum(states[1:]) % VOCABULARY
                tokens[number] = token + (part.stop % 5 == 0)
        return StepOutput(tokens)


def draft_model(cache: PagedCache, cost: float = 0, context: int = 1000) -> DraftModel:
    made = DraftModel("integers")
    made.connect(DraftRunner(cache), cache, cost, context)
    return made


@dataclass
class Later:
    """What a request waits for that drew no token: some steps of the engine."""

    engine: "Engine"
    step: int

    def done(self) -> bool:
        return self.engine.steps >= self.step


class Engine:
    """The engine's loop over a device, which checks each plan. It records every event and checks it."""

    def __init__(
        self, scheduler: Scheduler, forces: Forces = nothing, delays: Callable[[Request], int] = lambda request: 0
    ) -> None:
        """`delays`: the steps for which a request that should draw a token cannot. 0: it draws it."""
        self.scheduler = scheduler
        self.core: EngineCore[Scheduler, Batch] = EngineCore(scheduler, self, lambda: self.now)
        self.forces = forces
        self.delays = delays
        self.late: dict[str, Later] = {}  # the requests that drew no token in the last step
        self.failed: dict[int, str] = {}  # slices of the next output
        self.device = Device(scheduler.cache)
        self.in_flight: deque[Batch] = deque()
        self.requests: dict[str, Request] = {}
        self.alone: dict[str, tuple[list[int], FinishReason]] = {}  # the output of each, served alone
        if (speculation := speculation_in(scheduler)) is not None and isinstance(speculation.proposer, Oracle):
            self.alone = speculation.proposer.outputs
        self.delivered: dict[str, list[int]] = {}
        self.ended: dict[str, FinishReason] = {}
        self.batches: list[Batch] = []
        self.pending_preemptions = 0  # plans that left a preemption pending
        self.now = 0.0
        self.steps = 0

    def submit(self, *requests: Request, timeout: float | None = None) -> None:
        for request in requests:
            self.core.submit(request, timeout)
            self.requests[request.id] = request
            self.alone[request.id] = alone(request, self.scheduler.eos_ids, self.forces)
            self.delivered[request.id] = []

    def plan(self) -> Batch:
        scheduler, step = self.scheduler, self.core.launch()
        self.pending_preemptions += any(not sequence.request.finished for sequence in scheduler.running_set.leaving)
        if step is None and not self.in_flight and not scheduler.has_blocked:
            assert not scheduler.sequences, "a request is live and nothing is in flight, but the step is empty"
        return step.batch if step is not None else Batch()

    def pack(self, batch: Batch) -> Batch:
        budget = self.scheduler.chunker.budget
        assert batch.num_tokens <= budget.max_batched_tokens
        assert len(batch) <= self.scheduler.admission.max_running
        assert len({piece.request.id for piece in batch}) == len(batch)
        assert all(1 <= piece.length <= budget.max_chunk_size for piece in batch)
        return batch

    def launch(self, batch: Batch) -> "Engine":
        self.device.launch(batch)
        self.in_flight.append(batch)
        self.batches.append(batch)
        return self

    def output(self) -> StepOutput:
        """Of the oldest step in flight."""
        tokens = self.device.land()
        forced = {number: self.forces(token) for number, token in enumerate(tokens) if token is not None}
        batch, late = self.in_flight.popleft(), dict[int, Later]()
        for number, (piece, token) in enumerate(zip(batch, tokens, strict=True)):
            if piece.request.id in self.late and piece.start > piece.request.computed:
                late[number] = self.late[piece.request.id]
            elif token is not None and not piece.request.finished and (delay := self.delays(piece.request)):
                late[number] = Later(self, self.steps + delay)
        self.late = {batch.slices[number].request.id: later for number, later in late.items()}
        tokens = [None if number in late else token for number, token in enumerate(tokens)]
        failed, self.failed = self.failed, {}
        output = StepOutput(tokens, failed)
        for number, follows in forced.items():
            if follows.tokens or follows.ends:
                outcome_of(output, number).forced = follows
        for number, verified in self.device.verified.items():
            outcome_of(output, number).verified = verified
        for number, later in late.items():
            outcome_of(output, number).late = later
        return output

    def commit(self, failed: dict[int, str] | None = None) -> list[Event]:
        self.failed = failed or {}
        events = self.core.complete().events
        self.deliver(events)
        return events

    def discard_in_flight(self) -> None:
        """The step in flight raised."""
        self.core.discard_in_flight()
        self.in_flight.clear()
        self.device.steps.clear()

    def deliver(self, events: Sequence[Event]) -> None:
        for request, token, reason, _ in events:
            assert request.id not in self.ended, "an event after the end"
            assert token is not None or reason is not None
            if token is not None:
                self.delivered[request.id].append(token)
            if reason is not None:
                self.ended[request.id] = reason

    def step(self) -> Batch:
        """One iteration of the loop. At most `ahead` steps are in flight when it returns."""
        self.steps += 1
        assert self.steps < ENDLESS, f"{ENDLESS} steps, and what should happen did not: {self.scheduler.running_set}"
        batch = self.plan() if len(self.in_flight) <= self.scheduler.ahead else Batch()
        if len(self.in_flight) > (self.scheduler.ahead if batch else 0):
            self.commit()
        self.now += 1
        return batch

    def run(self, limit: int = 5000) -> "Engine":
        """Step until every request has ended."""
        for _ in range(limit):
            if not self.scheduler.sequences:
                break
            self.step()
        self.deliver(self.core.drain())
        assert not self.scheduler.has_work, f"not done after {limit} steps"
        assert not self.in_flight
        return self

    def check(self) -> None:
        """Check the invariants that hold at any moment."""
        check(self.scheduler)
        live = {sequence.request.id for sequence in self.scheduler.sequences if not sequence.request.finished}
        assert live == {name for name, request in self.requests.items() if not request.finished}
        for name, request in self.requests.items():
            expected = self.alone[name][0]
            assert request.output_tokens == expected[: len(request.output_tokens)]
            assert self.delivered[name] == request.output_tokens[: len(self.delivered[name])]

    def check_the_end(self) -> None:
        """After all requests have ended: each has the output that it has alone, and no page is referenced."""
        self.check()
        assert set(self.ended) == set(self.requests)
        for name, request in self.requests.items():
            assert self.ended[name] is request.finish_reason
            assert self.delivered[name] == request.output_tokens
            if self.ended[name] in (FinishReason.STOP, FinishReason.LENGTH):
                assert (self.delivered[name], self.ended[name]) == self.alone[name]
            if (request.error or "").startswith("out of memory"):
                assert request.total > self.scheduler.cache.max_tokens
        usage = self.scheduler.cache.usage
        assert usage.referenced == 0
        assert usage.free + usage.cached == usage.total


def waiting_of(scheduler: Scheduler) -> list[Request]:
    """Requests that have not run yet."""
    return [sequence.request for sequence in scheduler.turns if sequence.request.state is RequestState.WAITING]


def preempted_of(scheduler: Scheduler) -> list[Request]:
    return [sequence.request for sequence in scheduler.turns if sequence.request.state is RequestState.PREEMPTED]


def share_of(scheduler: Scheduler) -> FairShare:
    assert isinstance(scheduler.turns, FairQueues)
    return scheduler.turns.share


def request(
    name: str, prompt: int | Sequence[int] = 4, max_tokens: int = 5, *, ignore_eos: bool = True, **more: object
) -> Request:
    """A request with these prompt tokens, or with so many that no other request shares."""
    seed = zlib.crc32(name.encode())
    tokens = [1 + (seed + 7 * i) % 1000 for i in range(prompt)] if isinstance(prompt, int) else prompt
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=ignore_eos)
    return Request(name, tuple(tokens), params, **more)  # type: ignore[arg-type]

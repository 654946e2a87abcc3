"""World: a real engine with a few requests and pages. Its whole state can be read as integers, and be set from them.

The runner computes nothing: what a step yields is chosen from outside, as part of an event. A state is canonical:
pages, nodes and requests have the numbers of their order, and times their ranks. So two states that differ in names
alone are one.
"""

import marshal
import signal
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from operator import attrgetter
from typing import Any, NamedTuple

from phase0_request.batch import Batch, Event, Slice, StepOutput
from phase0_request.core import EngineCore, Step
from phase0_request.params import SamplingParams
from phase0_request.queue import QueueFullError, SequenceState
from phase0_request.request import FinishReason, Request, RequestState
from phase1_kv_pool.cache import PagedCache
from phase2_prefill_decode.extras.outcome import Verified, outcome_of
from phase3_chunked_prefill.budget import TokenBudget
from phase4_radix.prefix_cache import CacheHandle, PrefixCache
from phase4_radix.radix_tree import ROOT
from phase5_continuous.extras.fairness import FairQueues, FairShare
from phase5_continuous.extras.speculation.speculation import Speculation
from phase5_continuous.lab.exploring.setting import Setting
from phase5_continuous.lab.exploring.tree_state import read_tree, write_tree
from phase5_continuous.policies import policy
from phase5_continuous.scheduler import Scheduler
from phase5_continuous.turns import OneQueue

EOS = 0
ANSWER = 8  # the first prompt is answered A, B, C ...; the second I, J, K ...; the third Q, R, S ...
STATES = [*RequestState]
STATES_AT = {state: number for number, state in enumerate(STATES)}
KEY = attrgetter("key")
PATIENCE = 5.0  # seconds of the processor for one event
VIRTUAL_TIME = 1000.0  # of tenants that take turns, in each state: not 0, the count of one that was never here
GONE = 1 << 20  # in place of the number of a request that has ended and left

TOKEN, LAST, FAILED = 0, 1, 2  # outcomes of a slice: the next token, EOS, or an error
LATE = 3  # no token yet, since its mask is late
ACCEPTED, ENDED = 10, 20  # and n: so many tokens of a draft, and the next one, or EOS


class Row(NamedTuple):
    """A live request in a state, in the order of rank."""

    state: int
    num_tokens: int
    num_scheduled: int
    in_flight: int
    capacity: int
    waits_on: int  # GONE: for none
    until: int
    passed: int  # steps without it, though its next token was ready
    blocked: int  # 1: until its mask is there, 2: until the next plan

    # The pages that it holds, and what is in them.
    kind: int
    computed: int
    output: int
    table: tuple[int, ...] | None
    lock: tuple[int, int] | None  # the node, and the pages that are published


def rows_of(state: Any) -> list[Row]:
    """The live requests in a state as `marshal` loads it."""
    (held, *_), (rows, *_), _ = state
    return [Row(*row, *holds) for row, holds in zip(rows, held, strict=True)]


def served_in(state: Any) -> dict[str, float]:
    """The tokens of each tenant in a state of a world in which they take turns."""
    return {tenant: VIRTUAL_TIME + beyond for tenant, beyond in state[2][0]}


def tenants_in(state: Any) -> int:
    """How many tenants are here in such a state."""
    _, (*_, (_, here, *_), _), _ = state
    return len(here)


class Happening(NamedTuple):
    """What may happen: an arrival, a step that is planned, committed or lost, or an end from outside."""

    what: str
    of: int = 0  # the kind that arrives, or the request, by its place in the order of rank
    how: Any = ""  # the reason to end, the outcome of each slice, or the longest draft of each request that decodes


@dataclass(slots=True)
class Mask:
    """What a request waits for that drew no token."""

    is_there: bool = False

    def done(self) -> bool:
        return self.is_there


class Guess:
    """Proposes the output itself, so that any part of it may be accepted. How much of it is part of a plan: so a draft
    has each length that could pay, whatever was accepted before."""

    def __init__(self, world: "World") -> None:
        self.world = world
        self.lengths: dict[Request, int] = {}

    def propose(self, request: Request, most: int) -> list[int]:
        done, most = len(request.output_tokens), min(most, self.lengths[request])
        return self.world.outputs[self.world.kind_of[request]][done : done + most]


class World:
    """An engine with its requests. It is its own runner."""

    def __init__(self, setting: Setting) -> None:
        self.setting, kinds = setting, setting.kinds
        self.cache = (PrefixCache if setting.shares else PagedCache)(setting.pages, setting.page_size)
        self.guess = Guess(self)
        self.drafts = Speculation(self.guess, setting.drafts, spare_rows=1 << 20) if setting.drafts else None
        self.scheduler = Scheduler(
            self.cache,
            [EOS],
            TokenBudget(setting.chunk, setting.budget),
            policy=policy(setting.policy),
            turns=FairQueues if setting.fair else OneQueue,
            max_running=setting.places,
            watermark=setting.watermark,
            queue_limit=setting.limit,
            ahead=setting.ahead,
            extender=self.drafts,
        )
        self.core: EngineCore[Scheduler, Batch] = EngineCore(self.scheduler, self, lambda: self.now)
        self.now = 0.0  # for a record: no decision depends on it, since all have one time of arrival
        counted = Counter(kinds)
        self.kinds = [*counted]
        self.count = [*counted.values()]
        self.left = [*self.count]  # of each kind, how many have not come yet
        self.sequences: list[list[SequenceState]] = []  # of each kind, as many as may be here at once
        self.kind_of: dict[Request, int] = {}
        self.outputs: list[list[int]] = []
        prompts = [*dict.fromkeys(kind.prompt for kind in kinds)]
        for number, kind in enumerate(self.kinds):
            first = ord("A") + ANSWER * prompts.index(kind.prompt)
            self.outputs.append([*range(first, first + kind.tokens + setting.drafts)])
            named = [f"r{place + 1}" for place, each in enumerate(setting.kinds) if each == kind]
            params = SamplingParams(max_tokens=kind.tokens)
            made = [
                Request(name, tuple(map(ord, kind.prompt)), params, kind.priority, 0.0, kind.salt, kind.tenant)
                for name in named
            ]
            self.kind_of |= dict.fromkeys(made, number)
            rank = self.scheduler._rank(made[0])
            self.sequences.append([SequenceState(request, (rank, 0)) for request in made])
        self.lost = setting.lost  # steps that may still be lost
        self.twins = [[other for other in range(kind) if self.alike(other, kind)] for kind in range(len(self.kinds))]
        self.passed: dict[SequenceState, int] = {}
        self.committing = Batch()  # the step that is committed now
        self.outcome: tuple[int, ...] = ()  # of that step
        self.numbers: Iterator[int] | None = None  # for requests, in one piece: as a record numbers them
        self.arrived = ""  # the last request that came
        self.live: list[SequenceState] = []  # before the last event, by rank

    def alike(self, one: int, other: int) -> bool:
        """Whether two kinds differ in the names of tokens alone. Of those that have not come, the first comes first."""
        if self.kinds[one][1:] != self.kinds[other][1:] or self.count[one] != self.count[other]:
            return False
        texts = [[*map(ord, kind.prompt), *says] for kind, says in zip(self.kinds, self.outputs, strict=True)]
        swapped = [*texts]
        swapped[one], swapped[other] = texts[other], texts[one]
        if [*map(len, texts)] != [*map(len, swapped)]:
            return False
        pairs = {pair for text, named in zip(texts, swapped, strict=True) for pair in zip(text, named, strict=True)}
        return len(pairs) == len({a for a, _ in pairs}) == len({b for _, b in pairs})

    # It runs steps.

    def pack(self, batch: Batch) -> Batch:
        return batch

    def launch(self, batch: Batch) -> "World":
        self.cache.copied()
        return self

    def output(self) -> StepOutput:
        output = StepOutput([None] * len(self.committing))
        for number, (part, outcome) in enumerate(zip(self.committing, self.outcome, strict=True)):
            request = part.request
            if outcome == FAILED:
                output.failed[number] = "NaN in its logits"
            elif outcome == LATE:
                blocked = self.scheduler._live[request.id].blocked_by
                outcome_of(output, number).late = Mask() if blocked is None else blocked
            elif part.start + part.length - len(part.beyond) >= request.total and not request.finished:
                output.tokens[number], *rest = self.drawn(self.kind_of[request], len(request.output_tokens), outcome)
                if rest:
                    outcome_of(output, number).verified = [Verified(token) for token in rest]
        return output

    def drawn(self, kind: int, done: int, outcome: int) -> list[int]:
        """The tokens that a slice draws with this outcome, after `done` tokens of output."""
        accepted, ends = (outcome % 10, outcome >= ENDED) if outcome > ACCEPTED else (0, outcome == LAST)
        say = self.outputs[kind][done : done + accepted]
        return [*say, EOS if ends else self.outputs[kind][done + accepted]]

    # What may happen now,

    def events(self) -> Iterator[Happening]:
        """Everything that may happen in this state."""
        flying = self.core._in_flight
        for kind, left in enumerate(self.left):
            if left and not any(
                self.left[twin] == self.count[twin] for twin in self.twins[kind] if left == self.count[kind]
            ):
                yield Happening("submit", kind)
        if len(flying) <= self.setting.ahead:
            yield from (Happening("plan", how=lengths) for lengths in product(*map(self.lengths, self.decodes())))
        if flying:
            yield from (Happening("commit", how=outcome) for outcome in self.outcomes(flying[0][0].batch))
            if self.lost != 0:
                yield Happening("lose")
            if "again" in self.setting.also:
                yield Happening("again")
        if "reset" in self.setting.also and self.cache.usage.cached:
            yield Happening("reset")
        for place, sequence in enumerate(self.ordered()):
            if isinstance(sequence.blocked_by, Mask) and not sequence.blocked_by.is_there:
                yield Happening("mask", place)
            if not sequence.request.finished:
                for how in self.setting.ends:
                    if how != "stop" or sequence.request.state is not RequestState.WAITING:
                        yield Happening("end", place, how)

    def decodes(self) -> list[SequenceState]:
        """The requests that may get a draft: those that resume, too."""
        live = [each for each in self.ordered() if each.request.output_tokens] if self.drafts is not None else []
        paused = RequestState.PREEMPTED
        return [each for each in live if each.num_tokens - each.num_scheduled == 1 or each.request.state is paused]

    def lengths(self, sequence: SequenceState) -> Iterator[int]:
        """The lengths that its draft may have."""
        return iter(range(min(self.setting.drafts, sequence.longest - sequence.num_tokens), -1, -1))

    def outcomes(self, batch: Batch) -> Iterator[tuple[int, ...]]:
        """Each slice yields a token or the last one, independently of the others; or one of them fails."""
        also = self.setting.also
        choices, alive = list[tuple[int, ...]](), []
        for number, part in enumerate(batch.slices):
            request = part.request
            left = request.params.max_tokens - len(request.output_tokens) - 1  # after the next token
            alive += [] if request.finished else [number]
            if not request.finished and self.scheduler._live[request.id].blocked_by is not None:
                choices.append((LATE,))  # it follows a token that was not drawn
            elif request.finished or part.start + part.length - len(part.beyond) < request.total:
                choices.append((TOKEN,))  # it draws none
            else:
                accepted = range(1, len(part.beyond) + 1)
                choice = [TOKEN, *[LATE] * ("late" in also), *(ACCEPTED + n for n in accepted)]
                choices.append((*choice, *[LAST] * (left > 0), *(ENDED + n for n in accepted if n < left)))
        if "fail" in also:
            choices = [(*choice, FAILED) if number in alive else choice for number, choice in enumerate(choices)]
        yield from product(*choices)
        for number in alive if "fail" not in also else ():
            yield tuple(FAILED if each == number else choice[0] for each, choice in enumerate(choices))

    def is_in_time(self, event: Happening) -> bool:
        """Whether no mask is late in this commit. One may be, for ever: then its request never ends."""
        flying, live = self.core._in_flight[0][0].batch.slices, self.scheduler._live
        return not any(
            outcome == LATE and live[part.request.id].blocked_by is None
            for part, outcome in zip(flying, event.how, strict=True)
        )

    # and it happens.

    def happen(self, event: Happening) -> Step | None:
        """Let an event happen. Returns the step that was planned or committed, if there is one. Within `clock`:
        TimeoutError if it never ends."""
        signal.setitimer(signal.ITIMER_VIRTUAL, PATIENCE)
        try:
            return self._happen(event)
        finally:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)

    def _happen(self, event: Happening) -> Step | None:
        core = self.core
        self.live = self.ordered()
        if event.what == "submit":
            self.left[event.of] -= 1
            request = self.fresh(event.of)
            self.arrived = request.id
            try:
                core.submit(request)
            except QueueFullError:
                self.left[event.of] += 1
        elif event.what == "plan":
            self.guess.lengths = {each.request: n for each, n in zip(self.decodes(), event.how, strict=True)}
            return self.plan()
        elif event.what == "commit":
            self.committing, self.outcome = core._in_flight[0][0].batch, event.how
            return core.complete()
        elif event.what == "mask":
            mask = self.live[event.of].blocked_by
            assert isinstance(mask, Mask)
            mask.is_there = True
        elif event.what == "lose":
            self.lost = None if self.lost is None else self.lost - 1
            core.discard_in_flight()
        elif event.what == "again":
            core._in_flight.clear()
            self.scheduler.plan_again()
            for observer in core.observers:
                observer.discarded()
        elif event.what == "reset":
            assert isinstance(self.cache, PrefixCache)
            self.cache.reset()
        else:
            request = self.live[event.of].request
            if event.how == "stop":
                core.stop(request)
            else:
                core.finish(request, FinishReason(event.how))
        if not self.setting.fair:
            core.drain()  # nothing depends on when these are delivered
        return None

    def plan(self) -> Step | None:
        ready = [
            sequence
            for sequence in self.scheduler.running_set.running
            if sequence.num_tokens - sequence.num_scheduled == 1 and sequence.blocked_by is None
        ]
        step = self.core.launch()
        if step is None:
            if not self.core._in_flight:
                self.core.drain()
            return None
        here = set(step.batch.sequences)
        able = [each for each in ready if each.num_tokens - (each in here) <= each.capacity]
        self.passed = {each: self.passed.get(each, 0) + 1 for each in able if each not in here}
        return step

    def fresh(self, kind: int) -> Request:
        """A request of this kind that is not here: in one piece, each comes once."""
        own = [sequence.request for sequence in self.sequences[kind]]
        come = self.count[kind] - self.left[kind] - 1
        for request in own[come:] + own[:come]:
            if request.id not in self.scheduler._live:
                request.output_tokens, request.computed, request.state = [], 0, RequestState.WAITING
                request.finish_reason = request.error = request.more = None
                if self.numbers is not None:
                    request.id = f"r{next(self.numbers)}"
                return request
        raise AssertionError("all of this kind are here")

    def ordered(self) -> list[SequenceState]:
        """The live requests, the first in rank first."""
        return sorted(self.scheduler._live.values(), key=KEY)

    # Its state.

    def encode(self) -> bytes:
        """The state of the world, in canonical form. KeyError if a part of the engine knows a request that has left."""
        return marshal.dumps(self.read(), 2)

    def read(self) -> tuple[Any, Any, Any]:
        """The state as integers: of the pages, of the queues, and the rest. The invariants read the first two alone,
        which have the engine's counters for it, although these follow from the others if all is well."""
        scheduler, cache, running_set = self.scheduler, self.cache, self.scheduler.running_set
        live = self.ordered()
        place = {sequence: number for number, sequence in enumerate(live)}
        of = {sequence.request: number for number, sequence in enumerate(live)}
        pages: dict[int, int] = {}
        nodes: dict[int, int] = {ROOT: 0}
        tree: tuple[Any, ...] = ()
        if isinstance(cache, PrefixCache):
            tree = read_tree(cache.tree, nodes, pages)
        rows, held = [], []
        for sequence in live:
            request, waits, lock, named = sequence.request, sequence.waiting_on, None, None
            if (table := cache.tables.get(request.id)) is not None:
                named = tuple([pages.setdefault(page, len(pages)) for page in table])
                if isinstance(cache, PrefixCache):
                    handle = cache.handles[request.id]
                    lock = (nodes[handle.node], handle.published)
            waits_on, until = (place.get(waits[0], GONE), waits[1]) if waits else (GONE, 0)
            if waits_on == GONE:
                until = 0
            held.append((self.kind_of[request], request.computed, len(request.output_tokens), named, lock))
            rows.append(
                (
                    STATES_AT[request.state],
                    sequence.num_tokens,
                    sequence.num_scheduled,
                    sequence.in_flight,
                    sequence.capacity,
                    waits_on,
                    until,
                    self.passed.get(sequence, 0),
                    0 if sequence.blocked_by is None else 1 + sequence.blocked_by.done(),
                )
            )
        flying = tuple(
            [
                tuple([(of[request], start, length, beyond) for request, start, length, beyond in step.batch.slices])
                for step, _ in self.core._in_flight
            ]
        )
        not_fit, counts = running_set.did_not_fit, cache.allocator.counts
        owners, free = tuple([counts[page] for page in pages]), tuple([counts[page] for page in cache.allocator.free])
        turns, served = self._read_turns(place)
        return (
            (tuple(held), tree, owners, sum(counts), free, len(cache.tables)),
            (
                tuple(rows),
                tuple([place[each] for each in running_set.running]),
                tuple([place[each] for each in running_set.leaving]),
                turns,
                None if not_fit is None else of.get(not_fit, GONE),
            ),
            (
                served,
                tuple(self.left),
                tuple(dict.fromkeys([place[one] for one in scheduler.admission.prefixes._sequences if one in place])),
                tuple([of[request] for request in scheduler.chunker._skipped if request in of]),
                flying,
                self.lost,
                tuple([place[each] for each in scheduler._live.values()]),  # in the order of submission
            ),
        )

    def _read_turns(self, place: dict[SequenceState, int]) -> tuple[tuple[Any, ...], tuple[tuple[str, float], ...]]:
        """The queues, and the tokens of each tenant beyond the virtual time. Once all requests have come, only the
        differences between tenants that are here count."""

        def queues(one: OneQueue) -> tuple[tuple[int, ...], tuple[int, ...]]:
            return tuple([place[each] for each in one.waiting]), tuple([place[each] for each in one.preempted])

        turns = self.scheduler.turns
        if isinstance(turns, OneQueue):
            return queues(turns), ()
        assert isinstance(turns, FairQueues)
        share, served, begin = turns.share, turns.share.served, turns.share.virtual_time
        if not any(self.left):
            served = {tenant: tokens for tenant, tokens in served.items() if tenant in share._live}
            begin = min(served.values(), default=0.0)
        by_tenant = tuple([(tenant, *queues(queue)) for tenant, queue in turns.by_tenant.items()])
        here, names = tuple(sorted(share._live.items())), (bool(share.served), *sorted(served))
        news = [(self.kind_of[event.request], event.finish_reason is not None) for event in self.scheduler._events]
        beyond = sorted([(tenant, round(tokens - begin, 6)) for tenant, tokens in served.items()])
        return (by_tenant, here, tuple(news), turns._length, names), tuple(beyond)

    def decode(self, state: Any) -> None:
        """Put the world into a state, as `marshal` loads it."""
        (held, tree, *_), (rows, running, leaving, turns, not_fit), rest = state
        served, left, prefixes, skipped, flying, self.lost, submitted = rest
        scheduler, cache, running_set = self.scheduler, self.cache, self.scheduler.running_set
        self.left = [*left]
        used = [0] * len(self.kinds)
        live: list[SequenceState] = []
        for kind, *_ in held:
            live.append(self.sequences[kind][used[kind]])
            used[kind] += 1
        counts = [0] * self.setting.pages
        cache.tables, cache.changed, self.passed = {}, {}, {}
        handles: dict[str, CacheHandle] = {}
        for number, sequence in enumerate(live):
            where, *counted, waits_on, until, passed, blocked = rows[number]
            kind, computed, output, table, lock = held[number]
            request = sequence.request
            request.output_tokens = self.outputs[kind][:output]
            request.computed, request.state, request.more = computed, STATES[where], None
            request.finish_reason = FinishReason.ABORT if request.state is RequestState.FINISHED else None
            request.times.tokens = []
            sequence.key = (sequence.key[0], number)
            sequence.num_tokens, sequence.num_scheduled, sequence.in_flight, sequence.capacity = counted
            sequence.waiting_on = None if waits_on == GONE else (live[waits_on], until)
            sequence.blocked_by = Mask(blocked == 2) if blocked else None
            if passed:
                self.passed[sequence] = passed
            if table is not None:
                cache.tables[request.id] = [*table]
                for page in table:
                    counts[page] += 1
                if lock is not None:
                    node, published = lock
                    handles[request.id] = CacheHandle(node, published, request.total, 0, True)
        if isinstance(cache, PrefixCache):
            cache.handles = handles
            write_tree(cache.tree, tree, counts)
        cache._rows, cache._free_rows = {name: number for number, name in enumerate(cache.tables)}, []
        cache.allocator.counts = counts
        cache.allocator.free = [page for page in range(len(counts) - 1, -1, -1) if not counts[page]]
        scheduler._live = {live[number].request.id: live[number] for number in submitted}
        scheduler._submitted, scheduler._events = len(live), []
        running_set.running._entries = [live[number] for number in running]
        running_set.leaving = [live[number] for number in leaving]
        running_set.num_preemptions, running_set.preempted_for = 0, None
        gone = self.sequences[0][-1].request if not_fit == GONE else None
        running_set.did_not_fit = gone if not_fit is None or not_fit == GONE else live[not_fit].request
        scheduler.admission.prefixes._sequences = [live[number] for number in prefixes]
        scheduler.chunker._skipped = [live[number].request for number in skipped]
        self._write_turns(turns, served, live)
        self.core._in_flight.clear()
        for slices in flying:
            parts = [Slice(live[number].request, *part) for number, *part in slices]
            self.core._in_flight.append((Step(Batch(parts, [live[number] for number, *_ in slices])), self))
        if self.drafts is not None:
            self.drafts._chances.clear()
            self.drafts.proposals = {}

    def _write_turns(self, state: Any, served: Any, live: list[SequenceState]) -> None:
        def fill(queue: OneQueue, waiting: tuple[int, ...], preempted: tuple[int, ...]) -> OneQueue:
            queue.waiting._entries = [live[number] for number in waiting]
            queue.preempted._entries = [live[number] for number in preempted]
            return queue

        turns = self.scheduler.turns
        if isinstance(turns, OneQueue):
            fill(turns, *state)
            return
        assert isinstance(turns, FairQueues)
        queues, here, events, *_ = state
        turns.by_tenant = {tenant: fill(OneQueue(), *queue) for tenant, *queue in queues}
        turns._length = sum(map(len, turns.by_tenant.values()))
        counts = {tenant: VIRTUAL_TIME + beyond for tenant, beyond in served}
        turns.share = FairShare(counts, VIRTUAL_TIME, Counter(dict(here)))
        self.scheduler._events = [
            Event(self.sequences[kind][-1].request, None, FinishReason.ABORT if ends else None) for kind, ends in events
        ]


@contextmanager
def clock() -> Iterator[None]:
    """Have an event that never ends raise. A machine that sleeps delays no engine: the processor's time counts."""
    before = signal.signal(signal.SIGVTALRM, _endless)
    try:
        yield
    finally:
        signal.signal(signal.SIGVTALRM, before)


def _endless(*_: object) -> None:
    raise TimeoutError(f"it has taken {PATIENCE:.0f} seconds of the processor, and goes on")

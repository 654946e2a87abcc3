"""What must hold: in a state, of an event, and on the way from a state to the end of all its requests.

The first are the engine's own invariants. These here are of an event: they compare the state before it with the one
after. Each is a sentence of a chapter, and takes its limits from the setting and what was from the state before.

Some facts it takes from the engine, so an error in these breaks another promise or none: which request waits for a
prefix (`waits_for_prefix`), which one did not fit (`did_not_fit`), whether another gave way for pages or for a place
(`preempted_for`), whether a prompt still fits into the step (`StepPlan.fit`), the pages that a request needs
(`demand`), the order of each queue, and the tenants that are here.
"""

import marshal
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from phase0_request.batch import Event
from phase0_request.core import Step
from phase0_request.queue import SequenceState
from phase0_request.request import FinishReason, Request, RequestState
from phase3_chunked_prefill.budget import StepPlan
from phase5_continuous.admission import waits_for_prefix
from phase5_continuous.extras.fairness import FairQueues
from phase5_continuous.extras.invariants import check
from phase5_continuous.extras.record.held import demand
from phase5_continuous.lab.exploring.world import (
    EOS,
    FAILED,
    GONE,
    LATE,
    STATES,
    VIRTUAL_TIME,
    Happening,
    Row,
    World,
    rows_of,
    served_in,
    tenants_in,
)
from phase5_continuous.turns import OneQueue

WAITS, RUNS, PREEMPTED = map(STATES.index, (RequestState.WAITING, RequestState.RUNNING, RequestState.PREEMPTED))


class BrokenError(Exception):
    """A promise that does not hold, and how."""

    def __init__(self, promise: str, how: str) -> None:
        super().__init__(f"{promise}: {how}")
        self.promise = promise
        self.how = how


Own = Callable[[World], str | None]
"""A promise of the reader's own: what is wrong with the state of a world, or None."""


def follow(world: World, before: Any, event: Happening, known: set[int], own: Own | None = None) -> bytes:
    """Let an event happen, and return the state that it leads to. BrokenError if a promise does not hold. States and
    their parts whose hashes are `known` have been checked before."""
    try:
        step = world.happen(event)
    except Exception as error:
        raise BrokenError(f"no error in the engine ({type(error).__name__})", str(error)) from error
    return judge(world, before, event, step, known, own)


def judge(
    world: World,
    before: Any,
    event: Happening,
    step: Step | None,
    known: set[int],
    own: Own | None = None,
) -> bytes:
    """The state after an event that has happened. BrokenError if a promise does not hold."""
    try:
        *read, _ = state = _state(world)
        after, part = marshal.dumps(state, 2), hash(tuple(read))
        if (new := hash(after) not in known) and part not in known:
            check(world.scheduler)
            known.add(part)
    except Exception as error:
        raise BrokenError(f"the engine's invariants ({type(error).__name__})", str(error)) from error
    if event.what == "plan":
        _planned(world, before, step)
    elif event.what == "commit" and step is not None:
        _committed(world, rows_of(before), step, event)
    elif event.what == "end":
        sequence = world.live[event.of]
        _hold("what has ended leaves", sequence.request.finished, f"{sequence.request.id} has not ended")
    elif event.what == "submit":
        _came(world, before, state)
    elif event.what == "again":
        _kept(world, rows_of(before))
    if world.setting.fair and event.what in ("plan", "commit", "submit"):
        _charges(world, before, event, step)
    if own is not None and new and (wrong := own(world)):
        raise BrokenError("your own", wrong)
    return after


def _state(world: World) -> tuple[Any, Any, Any]:
    try:
        return world.read()
    except KeyError:  # a part of the engine knows what has left: what that is, the invariants say better
        check(world.scheduler)
        raise


def _hold(promise: str, condition: object, otherwise: str) -> None:
    if not condition:
        raise BrokenError(promise, otherwise)


def _came(world: World, before: Any, after: Any) -> None:
    """A full queue refuses a request, and is as it was."""
    limit, waiting = world.setting.limit, sum(row.state == WAITS for row in rows_of(before))
    full, same = limit is not None and waiting >= limit, marshal.loads(marshal.dumps(after, 2)) == before
    _hold("a full queue refuses requests", full == same, f"{waiting} of at most {limit} wait, and one more arrives")


def _kept(world: World, rows: list[Row]) -> None:
    """Steps that are planned again cost no request its pages or tokens."""
    for row, each in zip(rows, world.live, strict=True):
        if row.state == RUNS and row.capacity:
            has = each.request.computed, tuple(world.cache.tables.get(each.request.id, ())), each.in_flight
            _hold("running requests keep their pages", has == (row.computed, row.table, 0), f"{each.request.id}: {has}")


# A plan


def _planned(world: World, before: Any, step: Step | None) -> None:
    live, rows = world.live, rows_of(before)
    for row, sequence in zip(rows, live, strict=True):
        fits = row.num_tokens <= world.cache.max_tokens
        request, had_ended = sequence.request, STATES[row.state] is RequestState.FINISHED
        failed = request.finished and not had_ended
        _hold("a request that fits is served", not (failed and fits), f"{request.id} ends: {request.error}")
    admitted = [
        sequence
        for row, sequence in zip(rows, live, strict=True)
        if row.state != RUNS and sequence.request.state is RequestState.RUNNING
    ]
    _reserve(world, admitted)
    _order(world, rows, admitted)
    _victims(world, rows)
    if world.setting.fair:
        served = served_in(before)
        _next_tenant(rows, live, served, [each for each in (step.batch.sequences if step else ()) if each in admitted])
        _gives_way(world, rows, served, closed=before[1][4] is not None)
    _once(world, admitted)
    _room(world, step)
    if step is not None:
        _budget(world, rows, step)
        _advances(world, rows, step)
        _shares(world, rows, step)
        _rotates(rows, world, step)


def _budget(world: World, rows: list[Row], step: Step) -> None:
    """A step keeps its limits. A chunk that does not reach the end of its prompt ends where a page does, if it can."""
    setting, parts, size = world.setting, step.batch.slices, world.cache.page_size
    longest = max((part.length for part in parts), default=0)
    _hold("a step keeps its budget", step.batch.num_tokens <= setting.budget, f"{step.batch.num_tokens} tokens")
    _hold("a chunk keeps its size", longest <= setting.chunk, f"a slice has {longest} tokens")
    _hold("a request has one slice", len({part.request for part in parts}) == len(parts), "one has two")
    pending = {each.request: row.num_tokens for row, each in zip(rows, world.live, strict=True)}
    for part in parts:
        cut = part.stop < pending[part.request] and part.stop % size and part.stop // size * size > part.start
        _hold("a chunk ends where a page does", not cut, f"{part.request.id} computes up to token {part.stop}")


def _reserve(world: World, admitted: list[SequenceState]) -> None:
    """The watermark stays free when a request is admitted beside others."""
    running_set, usage = world.scheduler.running_set, world.cache.usage
    holders = len(running_set.running) + len(running_set.leaving)
    reserved, free = world.setting.reserved, usage.free + usage.cached
    if admitted and holders > 1:
        _hold("the watermark stays free", free >= reserved, f"{free} pages are, and {reserved} are to be")


def _order(world: World, rows: list[Row], admitted: list[SequenceState]) -> None:
    """Preempted requests resume before others start, and none is passed but by leave of the chapter."""
    started = [each for row, each in zip(rows, world.live, strict=True) if row.state == WAITS and each in admitted]
    for queue, tenant in _queues(world):
        new = [each for each in started if each.request.tenant == tenant or tenant is None]
        if new and queue.preempted:
            resumes = next(iter(queue.preempted)).request.id
            raise BrokenError("preempted requests resume first", f"{new[0].request.id} starts before {resumes} resumes")
        if world.setting.policy == "longest-prefix":
            continue
        for waiting in queue.waiting:
            long = waiting.num_tokens > world.setting.chunk
            passes = [each.request.id for each in new if each.key > waiting.key]
            if passes and not (long or waits_for_prefix(waiting)):
                raise BrokenError("the order is kept", f"{passes[0]} starts before {waiting.request.id}")


def _victims(world: World, rows: list[Row]) -> None:
    """The last in rank is preempted: of the blocked requests if there are any, and of the tenant that runs the most if
    tenants take turns."""
    ran = [(row, each) for row, each in zip(rows, world.live, strict=True) if row.state == RUNS and row.capacity]
    blocked = {each for row, each in ran if _is_blocked(row)}
    victims = [each for row, each in ran if not (each.capacity or each.request.finished) or _resumed_at_once(row, each)]
    for each in victims:
        fair, tenant = world.setting.fair, each.request.tenant
        kept = [other for _, other in ran if other.capacity and other not in victims]
        rest = [other for other in kept if not fair or other.request.tenant == tenant]
        if each not in blocked:
            how = f"{each.request.id} is preempted, and another is blocked"
            _hold("blocked requests are preempted first", blocked.isdisjoint(rest), how)
        later = [other for other in rest if other.key > each.key and (other in blocked or each not in blocked)]
        _hold("the last in rank is preempted", not later, f"{each.request.id} is preempted, and is not the last")
    places, going = (Counter(each.request.tenant for each in of) for of in ([each for _, each in ran], victims))
    while world.setting.fair and going:
        tenant = max(going, key=lambda tenant: places[tenant])  # the one that had to go next
        how = f"a request of {tenant} is preempted, and {dict(places)} run"
        _hold("the tenant with the most is preempted", places[tenant] == max(places.values()), how)
        places[tenant] -= 1
        going -= Counter([tenant])


def _is_blocked(row: Row) -> bool:
    """Whether a request is blocked in the next plan, too."""
    return row.blocked == 1 or bool(row.blocked and row.in_flight)


def _resumed_at_once(row: Row, sequence: SequenceState) -> bool:
    """Whether a plan has preempted a blocked request, and resumed it: nothing else ends its wait."""
    return _is_blocked(row) and sequence.blocked_by is None and bool(sequence.capacity)


def _next_tenant(
    rows: list[Row], live: list[SequenceState], served: dict[str, float], admitted: list[SequenceState]
) -> None:
    """The first request that starts in a step is of the tenant with the fewest tokens, counting its requests before
    that wait for a prefix."""
    preempted = {each.request.tenant for each in live if each.request.state is RequestState.PREEMPTED}
    preempted |= {each.request.tenant for row, each in zip(rows, live, strict=True) if row.state == PREEMPTED}
    tokens, before = {**served}, dict[SequenceState, float]()
    for row, each in zip(rows, live, strict=True):
        tenant = each.request.tenant
        if row.state == PREEMPTED or (row.state == WAITS and tenant not in preempted):
            before[each] = tokens[tenant]
            tokens[tenant] += row.num_tokens
    for first in [each for each in admitted if each in before][:1]:
        ready = {each: count for each, count in before.items() if each is first or not waits_for_prefix(each)}
        own = min(count for each, count in ready.items() if each.request.tenant == first.request.tenant)
        for each, count in ready.items():
            if count < own:
                counts = f"{first.request.id} starts at {own:g} tokens, and {each.request.id} at {count:g}"
                raise BrokenError("the tenant with the fewest tokens is next", counts)


def _gives_way(world: World, rows: list[Row], served: dict[str, float], *, closed: bool) -> None:
    """A tenant that runs far fewer requests than another takes a place from it, if it is next and has fewer tokens."""
    live, full = world.live, world.scheduler.running_set
    runs = [each for row, each in zip(rows, live, strict=True) if row.state == RUNS and row.capacity]
    places = Counter(each.request.tenant for each in runs)
    queued = [(row, each) for row, each in zip(rows, live, strict=True) if row.state in (WAITS, PREEMPTED)]
    ready = {each.request.tenant for row, each in queued if not _waited(rows, row)}
    most = max(places.values(), default=0)
    gave = [each for each in runs if not each.capacity and not each.request.finished]
    if gave and full.preempted_for is None:
        other, waiting = gave[0].request, {each.request.tenant for _, each in queued}
        fewer = [tenant for tenant in waiting if places[tenant] + 1 < places[other.tenant] == most]
        _hold("a place is taken from the tenant with the most", fewer, f"{other.id} gives way, and {dict(places)} run")
        return
    leaving = any(row.table is not None and not row.capacity for row in rows)
    if (len(runs) < world.setting.places and not closed) or leaving or any(row.blocked for row in rows) or not ready:
        return
    least = min(served[tenant] for tenant in ready)
    first = [tenant for tenant in ready if served[tenant] == least]
    busy = [tenant for tenant, number in places.items() if number == most]
    takes = all(places[one] + 1 < most and served[one] < served[other] for one in first for other in busy)
    _hold("a tenant with few requests takes a place", gave or not takes, f"{first[0]} waits, and {dict(places)} run")


def _waited(rows: list[Row], row: Row) -> bool:
    """Whether a request waited for the prefix of another one."""
    other = rows[row.waits_on] if row.waits_on != GONE else None
    return other is not None and bool(other.capacity) and not other.blocked and other.computed < row.until


def _charges(world: World, before: Any, event: Happening, step: Step | None) -> None:
    """A tenant pays for the tokens that its requests prefill and get. One that comes has saved up none: it begins at
    the virtual time, which is at least the fewest tokens of a tenant that waits when a request is admitted, and
    advances with each prompt."""
    turns, were, rows = world.scheduler.turns, served_in(before), rows_of(before)
    assert isinstance(turns, FairQueues)
    share, due = turns.share, dict[str, int]()
    if event.what == "submit":
        tenant = world.kinds[event.of].tenant
        saved = tenant in share.served and share.served[tenant] < share.virtual_time
        _hold("no tenant saves up tokens", not saved, f"{tenant} comes with fewer tokens than those that wait have had")
        return
    if event.what == "plan":
        for row, each in zip(rows, world.live, strict=True):
            starts = row.state != RUNS and each.request.state is RequestState.RUNNING
            if starts or _resumed_at_once(row, each):
                due[each.request.tenant] = due.get(each.request.tenant, 0) + each.request.total - each.request.computed
        if due:
            paused, both = RequestState.PREEMPTED, zip(rows, world.live, strict=True)
            queued = [
                each
                for row, each in both
                if row.state in (WAITS, PREEMPTED) or each.request.state is paused or _resumed_at_once(row, each)
            ]
            waited = {each.request.tenant for each in queued}
            least = max(VIRTUAL_TIME, min(were[tenant] for tenant in waited)) + sum(due.values()) / tenants_in(before)
            late = f"the virtual time is {share.virtual_time:g}, and must be at least {least:g}"
            _hold("no tenant saves up tokens", share.virtual_time > least - 0.001, late)
    elif step is not None:
        for news in step.events:
            if news.token is not None:
                due[news.request.tenant] = due.get(news.request.tenant, 0) + 1
    for tenant in share.served.keys() & were.keys():
        counted, owed = share.served[tenant] - were[tenant], due.get(tenant, 0)
        pays = f"{tenant} pays for {counted:g} tokens, and {owed} are its"
        _hold("a tenant pays for its tokens", abs(counted - owed) < 0.001, pays)


def _once(world: World, admitted: list[SequenceState]) -> None:
    """No request computes a page of prompt that another one is about to compute."""
    size = world.cache.page_size
    for each in admitted if world.cache.shares else ():
        prompt, salt = each.request.prompt_tokens, each.request.cache_salt
        until = each.request.computed + size
        for other in world.scheduler.running_set.running:
            theirs = other.request.prompt_tokens
            same = (
                other is not each
                and other.blocked_by is None
                and other.request.cache_salt == salt
                and theirs[:until] == prompt[:until]
            )
            if same and until < len(prompt) and until <= len(theirs) and other.request.computed < until:
                both = f"{each.request.id} and {other.request.id} both compute tokens {until - size} to {until}"
                raise BrokenError("a shared prefix is computed once", both)


def _room(world: World, step: Step | None) -> None:
    """No request waits beside room that fits."""
    running_set = world.scheduler.running_set
    if running_set.did_not_fit is not None:  # the others wait for it
        _lacks(world, running_set.did_not_fit)
        return
    if len(running_set.running) >= world.setting.places:
        return
    plan = step.batch if step is not None else None
    for queue, _ in _queues(world):
        for sequence in queue.preempted or queue.waiting:
            if isinstance(plan, StepPlan) and not plan.fit(0, sequence.num_tokens):
                continue
            if waits_for_prefix(sequence) and sequence.waiting_on is not None:
                other, until = sequence.waiting_on
                waits = f"{sequence.request.id} waits for {until} tokens of {other.request.id}"
                _hold("none waits in vain", until == _common(world, sequence, other), waits)
                continue
            _lacks(world, sequence.request)


def _lacks(world: World, request: Request) -> None:
    """A request that waits for pages lacks some: beside others, the watermark stays free."""
    running_set, (needed, available) = world.scheduler.running_set, demand(world.cache, request)
    needed += world.setting.reserved if running_set.running or running_set.leaving else 0
    room = f"{request.id} waits for pages: needed {needed}, available {available}"
    _hold("none waits beside room that fits", needed > available, room)


def _common(world: World, one: SequenceState, other: SequenceState) -> int:
    """The tokens that one request can have from another: whole pages, and not the last token of its prompt."""
    prompt, theirs, size = one.request.prompt_tokens, other.request.prompt_tokens, world.cache.page_size
    if not world.cache.shares or one.request.cache_salt != other.request.cache_salt:
        return 0
    pages = range(size, min(len(prompt) - 1, len(theirs)) + 1, size)
    return max((until for until in pages if prompt[:until] == theirs[:until]), default=0)


def _queues(world: World) -> Iterator[tuple[OneQueue, str | None]]:
    turns = world.scheduler.turns
    if isinstance(turns, FairQueues):
        yield from ((queue, tenant) for tenant, queue in turns.by_tenant.items())
    elif isinstance(turns, OneQueue):
        yield turns, None


def _advances(world: World, rows: list[Row], step: Step) -> None:
    """The first prompt advances in every step, and so does the first short one."""
    in_step = set(step.batch.sequences)
    prompts = [
        (row, each)
        for row, each in zip(rows, world.live, strict=True)
        if row.state == RUNS
        and row.capacity
        and each.capacity
        and not row.blocked
        and row.num_tokens - row.num_scheduled > 1
    ]
    short = [(row, each) for row, each in prompts if row.num_tokens - row.num_scheduled <= world.setting.chunk]
    for what, found in (("the first prompt", prompts), ("the first short prompt", short)):
        if found and found[0][1] not in in_step:
            single = found is short and sum(_tokens(world, rows, step)[1:]) == 1
            _hold("prompts advance", single, f"{what} is of {found[0][1].request.id}, and has no slice")


def _shares(world: World, rows: list[Row], step: Step) -> None:
    """Prompts that could use them get the tokens reserved for prompts; and short ones half of what decodes leave."""
    setting, running_set = world.setting, world.scheduler.running_set
    decodes, short, long = _tokens(world, rows, step)
    if len(running_set.running) >= setting.places or running_set.did_not_fit is not None:
        return
    if any(row.capacity and not each.capacity for row, each in zip(rows, world.live, strict=True)):
        return  # one that was preempted had tokens of this step, too late for others
    were = {each: row.state for row, each in zip(rows, world.live, strict=True)}
    ready = list[SequenceState]()
    for queue, tenant in _queues(world):
        own = [state for each, state in were.items() if tenant in (None, each.request.tenant)]
        first = PREEMPTED if PREEMPTED in own else WAITS  # only these were in turn
        ready += [each for each in queue if were[each] == first and not waits_for_prefix(each)]
    if ready:
        floor = max(setting.budget // 8, 1)
        waits = f"{ready[0].request.id} waits, and {decodes} of {setting.budget} tokens are for decodes"
        _hold("decodes leave tokens to prompts", short + long >= floor, waits)
    left = setting.budget - decodes
    if any(each.num_tokens <= setting.chunk for each in ready) and setting.policy != "longest-prefix":
        takes = f"{ready[0].request.id} waits, and long prompts have {long} of the {left} tokens for prompts"
        _hold("long prompts leave tokens to short ones", long <= left - left // 2, takes)


def _tokens(world: World, rows: list[Row], step: Step) -> tuple[int, int, int]:
    """The tokens of a step for decodes, for short prompts and for long ones."""
    of = {each.request: row for row, each in zip(rows, world.live, strict=True)}
    counts = [0, 0, 0]
    for part in step.batch.slices:
        row = of[part.request]
        pending = row.num_tokens - part.start  # what was cached does not count
        counts[0 if row.state == RUNS and pending == 1 else 1 + (pending > world.setting.chunk)] += part.length
    return counts[0], counts[1], counts[2]


def _rotates(rows: list[Row], world: World, step: Step) -> None:
    """A decode that was passed over is not passed again by one that was not."""
    in_step = set(step.batch.sequences)
    passed = {each: row.passed for row, each in zip(rows, world.live, strict=True)}
    decodes = [
        each
        for row, each in zip(rows, world.live, strict=True)
        if row.state == RUNS and each in in_step and row.num_tokens - row.num_scheduled == 1
    ]
    least = min((passed[each] for each in decodes), default=GONE)
    for each in world.passed:
        again = f"{each.request.id} is passed over again, and others run"
        _hold("decodes take turns", passed.get(each, 0) <= least, again)


# A commit


def _committed(world: World, rows: list[Row], step: Step, event: Happening) -> None:
    """Each request gets the token that was drawn, once and in order; and one end, which comes last."""
    expected: list[tuple[str, int | None, bool]] = []
    place = {each: number for number, each in enumerate(world.live)}
    of = {each.request: place[each] for each in world.live}
    for part, outcome in zip(step.batch.slices, event.how, strict=True):
        request, row = part.request, rows[of[part.request]]
        if STATES[row.state] is RequestState.FINISHED:
            continue
        known = len(request.prompt_tokens) + row.output
        if outcome == LATE:
            continue
        if outcome == FAILED:
            expected.append((request.id, None, True))
        elif part.start + part.length - len(part.beyond) >= known:
            most = request.params.max_tokens
            for number, token in enumerate(world.drawn(row.kind, row.output, outcome), row.output + 1):
                expected.append((request.id, token, token == EOS or number == most))
                if number == most:
                    break
    got = [(e.request.id, e.token, e.finish_reason is not None) for e in step.events if _of_step(e, step)]
    _hold("tokens come once and in order", got == expected, f"expected {expected}, got {got}")


def _of_step(event: Event, step: Step) -> bool:
    """Whether an event comes of this step, and not of an end from outside before it."""
    return event.finish_reason is not FinishReason.ABORT and any(p.request is event.request for p in step.batch.slices)

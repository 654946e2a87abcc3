"""Invariants of a scheduler, checked between two calls. Slow; for tests and for `--check-invariants`."""

from collections.abc import Mapping

from phase0_request.core import CoreObserver, Step
from phase0_request.queue import RequestQueue, SequenceState
from phase0_request.request import RequestState
from phase4_radix.extras.invariants import check_cache
from phase4_radix.extras.nodes import NodeView, nodes_of, path_to
from phase4_radix.prefix_cache import PrefixCache
from phase5_continuous.extras.fairness import FairQueues
from phase5_continuous.extras.record.held import demand
from phase5_continuous.scheduler import Scheduler
from phase5_continuous.turns import OneQueue


class SchedulerError(RuntimeError):
    """The scheduler contradicts itself or its cache: a fault of the engine."""


class Checks(CoreObserver):
    """Checks a scheduler after each step."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    def completed(self, step: Step) -> None:
        check(self._scheduler)

    def discarded(self) -> None:
        check(self._scheduler)


def check(scheduler: Scheduler) -> None:
    """Raise SchedulerError or PageError unless each request is in one queue, with the counts and pages of its state."""
    cache, running_set = scheduler.cache, scheduler.running_set
    check_cache(cache)
    usage = cache.usage
    _hold(usage.free + usage.cached + usage.referenced == usage.total, f"pages are lost or counted twice: {usage}")
    _check_queue(RequestState.RUNNING, running_set.running)
    _check_turns(scheduler)
    queued = [*running_set.running, *running_set.leaving, *scheduler.turns]
    _hold({*queued} == {*scheduler.sequences}, "the queues and the sequences are not of the same requests")
    _hold(len(queued) == len(scheduler.sequences), "a request is in two queues")
    _hold(len(running_set.running) <= scheduler.admission.max_running, f"{len(running_set.running)} are running")
    for sequence in running_set.running:
        _check_running(scheduler, sequence)
    for sequence in running_set.leaving:
        request = sequence.request
        _hold(sequence.in_flight > 0, f"request {request.id} is leaving, is not in flight, and is still here")
        has_left = request.state in (RequestState.RUNNING, RequestState.FINISHED) and not sequence.capacity
        _hold(has_left, f"request {request.id} is leaving, and is {request.state.value} or takes part in steps")
    to_be_preempted = [sequence for sequence in running_set.leaving if not sequence.request.finished]
    _hold(len(to_be_preempted) <= 1, f"{len(to_be_preempted)} requests are to be preempted at once")
    if not running_set.running and not running_set.leaving:
        _hold(usage.referenced == 0, f"no request runs, and {usage.referenced} pages are referenced")
    _check_room(scheduler)
    if isinstance(cache, PrefixCache):
        nodes = {view.node: view for view in nodes_of(cache.tree)}
        for sequence in queued:
            _check_prefix(cache, sequence, nodes)


def _check_turns(scheduler: Scheduler) -> None:
    turns = scheduler.turns
    _hold(len(turns) == len([*turns]), f"{len(turns)} are counted as waiting or preempted")
    if isinstance(turns, OneQueue):
        _check_queue(RequestState.WAITING, turns.waiting)
        _check_queue(RequestState.PREEMPTED, turns.preempted)
    if isinstance(turns, FairQueues):
        for tenant, queue in turns.by_tenant.items():
            _check_queue(RequestState.WAITING, queue.waiting)
            _check_queue(RequestState.PREEMPTED, queue.preempted)
            mixed = not queue or any(sequence.request.tenant != tenant for sequence in queue)
            _hold(not mixed, "a queue is empty, or of more than one tenant")
        live = {sequence.request.tenant for sequence in scheduler.sequences if not sequence.request.finished}
        _hold(live <= turns.share.served.keys(), "a tenant has a request and no count of its tokens")
        _hold(scheduler.has_work or not turns.share.served, "no request is live, and a tenant is ahead of others")


def _check_queue(state: RequestState, queue: RequestQueue) -> None:
    sequences = list(queue)
    _hold(sequences == sorted(sequences, key=lambda sequence: sequence.key), f"the {state.value} are out of order")
    for sequence in sequences:
        request = sequence.request
        _hold(request.state is state, f"request {request.id} is {request.state.value} among the {state.value}")
        if state is not RequestState.RUNNING:
            idle = not (sequence.capacity or sequence.in_flight or sequence.num_scheduled or request.computed)
            _hold(idle, f"request {request.id} is {state.value} and takes part in steps")


def _check_running(scheduler: Scheduler, sequence: SequenceState) -> None:
    request, page_size = sequence.request, scheduler.cache.page_size
    num_scheduled, num_tokens, capacity = sequence.num_scheduled, sequence.num_tokens, sequence.capacity
    counts = f"request {request.id}: computed {request.computed}, scheduled {num_scheduled}, of {num_tokens}"
    _hold(request.computed <= num_scheduled <= num_tokens <= request.total + sequence.in_flight, counts)
    _hold(sequence.in_flight > 0 or num_scheduled == request.computed, counts)
    pages = len(scheduler.cache.table(request))
    _hold(num_scheduled <= capacity == pages * page_size, f"{counts}, capacity {capacity}")
    computes = sequence.in_flight or sequence.blocked_by is not None or num_scheduled < num_tokens
    _hold(bool(computes), f"{counts}: it runs, and has nothing to compute")
    _hold(capacity <= sequence.longest + page_size, f"{counts}: it holds pages that it can never need")


# region exercise 5.7
def _check_room(scheduler: Scheduler) -> None:
    """The request that admission remembers as too large for the free pages waits, and is."""
    cache, running_set = scheduler.cache, scheduler.running_set
    if (request := running_set.did_not_fit) is None:
        return
    waits = any(sequence.request is request for sequence in scheduler.turns)
    _hold(waits, f"no other request may pass {request.id}, and it does not wait")
    watermark = running_set.watermark if running_set.running or running_set.leaving else 0
    needed, available = demand(cache, request, watermark)
    fits = f"request {request.id} waits for pages: needed {needed}, available {available}"
    _hold(needed > available, fits)


# endregion


def _check_prefix(cache: PrefixCache, sequence: SequenceState, nodes: Mapping[int, NodeView]) -> None:
    """The pages that a request shares are computed, and have its own tokens and its salt."""
    request = sequence.request
    if (handle := cache.handles.get(request.id)) is None:
        return
    published = handle.published * cache.page_size
    done = f"request {request.id} has published {published} tokens, and computed {request.computed}"
    _hold(published <= request.computed, done)
    path = [nodes[node] for node in path_to(cache.tree, handle.node)]
    tokens = [token for view in path for token in view.tokens]
    _hold(tokens == request.tokens(0, published), f"request {request.id} reads pages with the tokens {tokens}")
    salts = [view.salt for view in path[:1]]
    _hold(salts in ([], [request.cache_salt]), f"request {request.id} reads pages of the salt {salts}")


def _hold(condition: bool, otherwise: str) -> None:
    if not condition:
        raise SchedulerError(otherwise)

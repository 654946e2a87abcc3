"""The requests that a plan has left waiting, and why. It reads the scheduler after the plan, and changes nothing."""

from operator import attrgetter
from typing import NamedTuple

from phase0_request.queue import SequenceState
from phase0_request.request import Request
from phase1_kv_pool.cache import PagedCache
from phase1_kv_pool.extras.windows import WindowedCache
from phase3_chunked_prefill.budget import StepPlan
from phase4_radix.prefix_cache import PrefixCache
from phase5_continuous.admission import waits_for_prefix
from phase5_continuous.extras.fairness import FairQueues
from phase5_continuous.scheduler import Scheduler


class Held(NamedTuple):
    """A request that a plan has not admitted, and why:

    tokens      the step's budget is used up
    long        the step has no tokens left for long prompts
    places      max_running requests run
    pages       it needs more pages than are available: both
    watermark   the pool has the pages that it needs, but not those that must stay free besides: both
    prefix      another request computes its prefix: that one
    fairness    another tenant is next in turn: that one
    """

    request: Request
    why: str
    more: tuple[int | str | Request, ...] = ()


def held(scheduler: Scheduler, plan: StepPlan) -> list[Held]:
    """The next request in turn, and why the last plan has not admitted it. If one did not fit, it is that one; else
    the request that is first in rank is added, if another tenant is served before it."""
    turns = scheduler.turns
    if not turns:
        return []
    if (request := scheduler.running_set.did_not_fit) is not None:
        return [_lacking(scheduler, request)]
    if not isinstance(turns, FairQueues):
        return [_why(scheduler, next(turns.in_turn()), plan)]
    heads, served = turns.heads(), turns.share.served
    head = min(heads, key=lambda each: served[each.request.tenant])
    first, tenant = min(heads, key=attrgetter("key")), head.request.tenant
    others = [Held(first.request, "fairness", (tenant,))] if first.request.tenant != tenant else []
    return [_why(scheduler, head, plan), *others]  # the head was tried; requests with a head start may not have been


def _why(scheduler: Scheduler, sequence: SequenceState, step: StepPlan) -> Held:
    """Why a plan has not admitted this request, the next in turn."""
    request = sequence.request
    if sequence.waiting_on is not None and waits_for_prefix(sequence):
        return Held(request, "prefix", (sequence.waiting_on[0].request,))
    if len(scheduler.running_set.running) >= scheduler.admission.max_running:
        return Held(request, "places")
    return Held(request, "long" if step.left else "tokens")


def _lacking(scheduler: Scheduler, request: Request) -> Held:
    needed, available = demand(scheduler.cache, request)
    return Held(request, "pages" if needed > available else "watermark", (needed, available))


def demand(cache: PagedCache, request: Request, more: int = 0) -> tuple[int, int]:
    """The pages that a request without a page table needs for all its tokens and as many `more`, and the pages
    available to it."""
    if isinstance(cache, WindowedCache):
        return cache.demand(request, request.total + more)
    needed, available = -(-(request.total + more) // cache.page_size), cache.allocator.num_free
    if not isinstance(cache, PrefixCache):
        return needed, available
    cached = cache.match(request).pages  # its page table would lock those that no other names
    evictable = cache.tree.num_evictable - sum(cache.allocator.count(page) == 1 for page in cached)
    return needed - len(cached), available + evictable

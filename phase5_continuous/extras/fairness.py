"""Fair queueing: decides which tenant is next. Tenants are the clients that a server can tell apart."""

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heapreplace
from itertools import chain, islice

from phase0_request.batch import Event
from phase0_request.queue import QueueFullError, SequenceState
from phase0_request.request import RequestState
from phase5_continuous.admission import SEARCHED, waits_for_prefix
from phase5_continuous.turns import OneQueue


@dataclass(slots=True)
class FairShare:
    """Counts the tokens that are computed for each tenant. The tenant with the fewest is next.

    Tenants that all have requests waiting get about the same number of tokens, however many requests each has. The
    others get what one tenant does not use: no place stays empty while a request waits.

    A tenant cannot save up tokens. When it submits a request, its count is raised to the *virtual time*: the least
    count among the tenants that wait. With every admitted prompt the virtual time also advances, by the prompt's tokens
    divided by the number of tenants. So it passes every count in the end, and new tenants cannot pass a request
    forever.
    """

    served: dict[str, float] = field(default_factory=dict)  # tokens, by tenant
    virtual_time: float = 0.0
    _live: Counter[str] = field(default_factory=Counter)  # requests, by tenant

    # region exercise 5.6
    def enter(self, tenant: str) -> None:
        """Count a submitted request."""
        self._live[tenant] += 1
        self.served[tenant] = max(self.served.get(tenant, 0.0), self.virtual_time)

    # endregion

    def leave(self, tenant: str) -> None:
        """Count the end of a request. A tenant without any is remembered until the virtual time passes its count."""
        self._live[tenant] -= 1
        if not self._live[tenant]:
            del self._live[tenant]
            ahead = self.served.items() if self._live else ()
            self.served = {name: tokens for name, tokens in ahead if name in self._live or tokens > self.virtual_time}

    # region exercise 5.6
    def charge(self, tenant: str, tokens: int) -> None:
        """Charge the tokens that a request prefills, all of them when it is admitted, and again when it resumes after a
        preemption. Each token of its output is added to `served` when that is committed."""
        self.served[tenant] += tokens
        self.virtual_time += tokens / len(self._live)

    def in_turn(self, queues: Mapping[str, Iterable[SequenceState]]) -> Iterator[SequenceState]:
        """Yield the requests of the queues, of which there is at least one, in the order of admission: the next one
        is always of the tenant with the fewest tokens, counting its requests that were yielded before."""
        heap = [(self.served[tenant], number, iter(queue)) for number, (tenant, queue) in enumerate(queues.items())]
        heapify(heap)
        self.virtual_time = max(self.virtual_time, heap[0][0])
        while heap:
            served, number, queue = heap[0]
            entry = next(queue, None)
            if entry is None:
                heappop(heap)
            else:
                yield entry
                heapreplace(heap, (served + entry.num_tokens, number, queue))

    # endregion


class FairQueues:
    """A queue for each tenant that has requests waiting. Tenants take turns, and get equal shares of tokens, places and
    pages: a tenant that runs far fewer requests than another takes a place from it. A policy orders the requests of a
    tenant, but not the tenants, since any client could claim a head start. At most `limit` new requests wait in all."""

    def __init__(self, limit: int | None = None, share: FairShare | None = None) -> None:
        self.limit = limit
        self.share = share or FairShare()
        self.clear()

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[SequenceState]:
        return chain.from_iterable(self.by_tenant.values())

    def add(self, sequence: SequenceState) -> None:
        if self.limit is not None and sum(len(queue.waiting) for queue in self.by_tenant.values()) >= self.limit:
            raise QueueFullError(self.limit)
        self.put_back(sequence)
        self.share.enter(sequence.request.tenant)

    def put_back(self, sequence: SequenceState) -> None:
        self.by_tenant.setdefault(sequence.request.tenant, OneQueue()).put_back(sequence)
        self._length += 1

    def remove(self, sequence: SequenceState) -> None:
        """Take a request out of the queue, and charge its tenant if it runs now."""
        tenant = sequence.request.tenant
        queue = self.by_tenant[tenant]
        queue.remove(sequence)
        self._length -= 1
        if not queue:
            del self.by_tenant[tenant]
        if sequence.request.state is RequestState.RUNNING:
            self.share.charge(tenant, sequence.num_tokens - sequence.num_scheduled)

    def clear(self) -> None:
        self.by_tenant: dict[str, OneQueue] = {}
        self._length = 0

    def in_turn(self) -> Iterator[SequenceState]:
        return self.share.in_turn({tenant: queue.in_turn() for tenant, queue in self.by_tenant.items()})

    def heads(self) -> list[SequenceState]:
        """The next request of each tenant."""
        return [next(queue.in_turn()) for queue in self.by_tenant.values()]

    def reorder(
        self, candidates: Sequence[SequenceState], place: Callable[[SequenceState], float]
    ) -> Sequence[SequenceState]:
        """Order the requests of each tenant by place. The order of the tenants stays."""
        of_tenant = defaultdict[str, deque[SequenceState]](deque)
        for sequence in sorted(candidates, key=place):
            of_tenant[sequence.request.tenant].append(sequence)
        return [of_tenant[sequence.request.tenant].popleft() for sequence in candidates]

    def victim(self, running: Iterable[SequenceState]) -> SequenceState:
        """The last request in rank of the tenant that runs the most: of its blocked requests if there are any."""
        places = places_of(running)
        return max(running, key=lambda each: (places[each.request.tenant], each.blocked_by is not None, each.key))

    def gives_way(self, running: Iterable[SequenceState]) -> SequenceState | None:
        """A request of the tenant that runs the most, if the next in turn is of a tenant that runs at least two fewer
        and has had fewer tokens. A blocked request gives its place to any tenant that runs at least two fewer."""
        places = places_of(running)
        if min(places[tenant] for tenant in self.by_tenant) + 1 >= max(places.values(), default=0):
            return None
        victim = self.victim(running)
        other, served = victim.request.tenant, self.share.served
        ready = (sequence for sequence in islice(self.in_turn(), SEARCHED) if not waits_for_prefix(sequence))
        for sequence in islice(ready, 1) if victim.blocked_by is None else self.heads():
            tenant = sequence.request.tenant
            if places[tenant] + 1 < places[other] and (victim.blocked_by is not None or served[tenant] < served[other]):
                return victim
        return None

    def delivered(self, events: Iterable[Event]) -> None:
        served = self.share.served
        for request, token, reason, _ in events:
            if token is not None:
                served[request.tenant] += 1
            if reason is not None:
                self.share.leave(request.tenant)
                served = self.share.served

    def charge(self, tenant: str, tokens: float) -> None:
        """Charge a tenant for other work, counted in tokens, as long as it has a request here."""
        if tenant in self.share.served:
            self.share.served[tenant] += tokens


def places_of(running: Iterable[SequenceState]) -> Counter[str]:
    """How many requests each tenant runs."""
    return Counter(sequence.request.tenant for sequence in running)

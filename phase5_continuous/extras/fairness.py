"""Fair queueing: which tenant is next. Tenants are the clients of a server, as far as it can tell them apart."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from heapq import heapify, heappop, heapreplace
from itertools import chain

from phase0_request.queue import QueueFullError, RequestQueue, SequenceState


class FairQueue:
    """Requests that wait: a queue for each tenant that has one here, in the order of their keys."""

    def __init__(self, limit: int | None = None) -> None:
        self.limit = limit
        self.by_tenant: dict[str, RequestQueue] = {}
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[SequenceState]:
        return chain.from_iterable(self.by_tenant.values())

    def add(self, entry: SequenceState) -> None:
        """Insert an entry into the queue of its tenant. QueueFullError if all of them together are at the limit."""
        if self.limit is not None and self._length >= self.limit:
            raise QueueFullError(self.limit)
        self.by_tenant.setdefault(entry.request.tenant, RequestQueue()).add(entry)
        self._length += 1

    def remove(self, entry: SequenceState) -> None:
        """Take an entry out. KeyError or ValueError if it is not here."""
        queue = self.by_tenant[entry.request.tenant]
        queue.remove(entry)
        self._length -= 1
        if not queue:
            del self.by_tenant[entry.request.tenant]


@dataclass(slots=True)
class FairShare:
    """Counts the tokens that are computed for each tenant. The tenant with the fewest is next.

    Tenants that all have requests waiting get about the same number of tokens, however many requests each of them has.
    What one tenant does not use is for the others: no place stays empty while a request waits.

    A tenant cannot save up tokens. When it submits a request, its count is raised to the *virtual time*: the least
    count among the tenants that wait. With every admitted prompt the virtual time also advances, by the prompt's tokens
    divided by the number of tenants. So it passes every count in the end, and new tenants do not pass a request for
    ever.
    """

    served: dict[str, float] = field(default_factory=dict)  # tokens, by tenant
    virtual_time: float = 0.0
    _live: Counter[str] = field(default_factory=Counter)  # requests, by tenant

    # region exercise 5.5
    def enter(self, tenant: str) -> None:
        """Count a submitted request."""
        self._live[tenant] += 1
        self.served[tenant] = max(self.served.get(tenant, 0.0), self.virtual_time)

    def leave(self, tenant: str) -> None:
        """Count the end of a request. A tenant without any is remembered until the virtual time passes its count."""
        self._live[tenant] -= 1
        if not self._live[tenant]:
            del self._live[tenant]
            ahead = self.served.items() if self._live else ()
            self.served = {name: tokens for name, tokens in ahead if name in self._live or tokens > self.virtual_time}

    def charge(self, tenant: str, tokens: int) -> None:
        """Charge the tokens that a request prefills, all of them when it is admitted, and again when it resumes after a
        preemption. The scheduler adds each token of its output to `served` when that is committed."""
        self.served[tenant] += tokens
        self.virtual_time += tokens / len(self._live)

    def in_turn(self, queues: Mapping[str, Iterable[SequenceState]]) -> Iterator[SequenceState]:
        """The requests of the queues, of which there is at least one, in the order in which they are to be admitted:
        always the next one of the tenant with the fewest tokens, with those of its requests before it counted."""
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

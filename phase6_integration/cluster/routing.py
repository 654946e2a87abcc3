"""Routing: picks the replica that has most of a prompt cached, unless it is too busy. It knows neither Ray nor HTTP.

A report of a replica is half a second old, in which a router sends many requests. So it counts those that it sends by
itself, and expects the pages of their prompts where it has sent them.
"""

import random
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from itertools import zip_longest
from typing import Any
from weakref import WeakSet

from phase6_integration.cluster.digest import DigestView, ReplicaReport
from phase6_integration.engine.stats import Gauges

NO_STATE: dict[str, Any] = dict.fromkeys(
    ("running", "waiting", "pages_total", "pages_free", "pages_used", "pages_cached"), 0
)
LINGER = 2  # reports after the end of a request, by which its replica has told of its pages

tables: "WeakSet[RoutingTable]" = WeakSet()  # of this process: Ray Serve makes the routers, and no call returns them


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingPolicy:
    """How cached pages are traded against load."""

    load_weight: float = 0.5  # the share of a prompt that is worth as much as a whole average load
    slack: int = 4  # requests that a replica may be ahead of the least loaded one
    imbalance: float = 0.5  # or this share of the average load, if that is more


# region rank
def rank(
    loads: Sequence[float], hits: Sequence[int], pages: int, policy: RoutingPolicy, draw: random.Random
) -> list[int]:
    """Order replicas for a request of this many pages, the best first. `hits` are the pages that each replica has
    cached, `loads` its unfinished requests.

    The cost of a replica is the share of the prompt that it would compute, plus its load above the least one, relative
    to the average. Replicas beyond the bound of imbalance come last, by load alone, so a popular prefix cannot overload
    one of them. Without any hit, the less loaded of two randomly drawn replicas comes first.
    """
    numbers = range(len(loads))
    order = draw.sample(numbers, len(loads))  # equal ones take turns
    if not any(hits):
        return sorted(order[:2], key=loads.__getitem__) + sorted(order[2:], key=loads.__getitem__)
    least, average = min(loads), sum(loads) / len(loads)
    bound = least + max(policy.slack, policy.imbalance * average)

    def cost(replica: int) -> tuple[bool, float]:
        load = loads[replica]
        if load > bound:
            return True, load
        return False, 1 - hits[replica] / pages + policy.load_weight * (load - least) / max(1.0, average)

    return sorted(order, key=cost)


# endregion


class ReplicaView:
    """What a router knows of a replica: its last report, and what it has sent to it since."""

    def __init__(self) -> None:
        self.digest = DigestView()
        self.gauges = Gauges()
        self.expected: Counter[int] = Counter()  # pages of prompts that were sent to it
        self.sent: dict[str, Sequence[int]] = {}  # the pages of unfinished requests of this router, by id
        self.others = 0  # unfinished requests of other routers
        self._finished: list[tuple[int, Sequence[int]]] = []  # how many reports to wait before pages are not expected

    @property
    def load(self) -> int:
        return len(self.sent) + self.others

    def hits(self, pages: Sequence[int]) -> int:
        """How many pages at the start of a prompt it has, or is about to."""
        cached, expected = self.digest.pages, self.expected
        for count, page in enumerate(pages):
            if page not in cached and page not in expected:
                return count
        return len(pages)

    def finish(self, id: str) -> None:
        if (pages := self.sent.pop(id, None)) is not None:
            self._finished.append((LINGER, pages))

    def apply(self, report: ReplicaReport, front: str) -> None:
        self.digest.apply(report)
        self.gauges = report.gauges
        self.others = sum(count for name, count in report.load.items() if name != front)
        finished, self._finished = self._finished, []
        for reports, pages in finished:
            if reports > 1:
                self._finished.append((reports - 1, pages))
                continue
            for page in pages:
                self.expected[page] -= 1
                if not self.expected[page]:
                    del self.expected[page]


class RoutingTable:
    """The replicas that a router knows, and where its unfinished requests are."""

    def __init__(self, policy: RoutingPolicy | None = None, seed: int | None = None) -> None:
        self.front = ""  # the name under which replicas report the requests of this router
        self.policy = policy or RoutingPolicy()
        self.replicas: dict[str, ReplicaView] = {}
        self._ended = Gauges()  # of replicas that are gone, what they counted
        self._draw = random.Random(seed)
        tables.add(self)

    def keep(self, names: Iterable[str]) -> None:
        """These are the replicas now. Of others only what they counted is kept."""
        before, self.replicas = self.replicas, {name: self.replicas.get(name) or ReplicaView() for name in names}
        gone = [replace(view.gauges, **NO_STATE) for name, view in before.items() if name not in self.replicas]
        self._ended = total([self._ended, *gone])

    def report(self, name: str, report: ReplicaReport) -> None:
        view = self.replicas[name]
        if report.version > view.digest.version:
            view.apply(report, self.front)

    @property
    def gauges(self) -> Gauges:
        """The state of all replicas together, and what they and those before them have counted."""
        return total([self._ended, *(view.gauges for view in self.replicas.values())])

    def choose(self, pages: Sequence[int], names: Sequence[str]) -> list[str]:
        """These replicas, the best for a prompt of these pages first."""
        views = [self.replicas[name] for name in names]
        hits = [view.hits(pages) for view in views]
        order = rank([view.load for view in views], hits, len(pages), self.policy, self._draw)
        return [names[number] for number in order]

    def send(self, name: str, id: str, pages: Sequence[int]) -> None:
        """A request goes to a replica, and to no other one that it was to go to before."""
        for other, view in self.replicas.items():
            if other != name:
                view.finish(id)
        view = self.replicas[name]
        if id not in view.sent:
            view.sent[id] = pages
            view.expected.update(pages)

    def finish(self, id: str) -> None:
        for view in self.replicas.values():
            view.finish(id)


def total(gauges: Iterable[Gauges]) -> Gauges:
    each = [*gauges]
    columns: dict[str, Any] = {field.name: [getattr(one, field.name) for one in each] for field in fields(Gauges)}
    kept = tuple(map(sum, zip_longest(*columns.pop("kept"), fillvalue=0)))
    return Gauges(kept=kept, **{name: sum(column) for name, column in columns.items()})

"""Policies: the order in which waiting requests are admitted, by arrival and with bounded head starts."""

from collections.abc import Callable
from dataclasses import dataclass

from phase0_request.request import Request
from phase1_kv_pool.cache import PagedCache

LEVELS = 8  # of priority on either side of 0; levels beyond count as the outermost


class Policy:
    """A policy gives some of the waiting requests a head start, in seconds: they are admitted earlier. This base class
    gives none.

    `rank` places a request once, at submission, and also decides which request is preempted: the last.
    `head_start` may move it forward among the first few candidates, by something that changes while it waits, such as
    the cache.

    Both together give no head start of more than `bound`. So a request that could start is never passed by one that
    arrives more than `bound` seconds after it: waiting requests age. Two kinds of request cannot start yet, and may be
    passed in the meantime, since it costs them nothing:

    - a long prompt after other long ones, until these are computed: half of a step's prompt tokens are for them;
    - a request that waits for a prefix in progress, until the other request has computed it, or leaves.
    """

    @property
    def bound(self) -> float:
        """The largest head start, in seconds."""
        return 0.0

    def rank(self, request: Request) -> float:
        """The time at which a request counts as having arrived. Called once, at submission. The last request in rank is
        preempted first."""
        return request.arrival

    def head_start(self, request: Request, cache: PagedCache) -> float:
        """The seconds by which a waiting request is now ahead of its rank. Called for the first few candidates."""
        return 0.0


class FirstComeFirstServed(Policy):
    """Orders requests by arrival alone."""


@dataclass(frozen=True)
class ByPriority(Policy):
    """Orders requests by priority: a level is worth `seconds` of waiting. Lower levels go first."""

    seconds: float = 30.0

    # region exercise 5.5
    @property
    def bound(self) -> float:
        """The largest head start of one request over another, in seconds."""
        return 2 * LEVELS * self.seconds

    def rank(self, request: Request) -> float:
        """The arrival, later by `seconds` for each level. Levels beyond LEVELS on either side count as LEVELS."""
        level = min(max(request.priority, -LEVELS), LEVELS)
        return request.arrival + level * self.seconds

    # endregion


@dataclass(frozen=True)
class LongestPrefixFirst(Policy):
    """Admits prompts with a cached beginning first: a prompt that is all cached is worth `seconds`.

    Such a prompt passes only the few other candidates. Passing the whole queue would take a lookup for every waiting
    request.
    """

    seconds: float = 30.0

    # region exercise 5.5
    @property
    def bound(self) -> float:
        """The largest head start of one request over another, in seconds."""
        return self.seconds

    def head_start(self, request: Request, cache: PagedCache) -> float:
        """`seconds` times the fraction of the request's tokens that are cached now."""
        return self.seconds * cache.cached_tokens(request) / request.total

    # endregion


POLICIES: dict[str, Callable[[], Policy]] = {
    "fcfs": FirstComeFirstServed,
    "priority": ByPriority,
    "longest-prefix": LongestPrefixFirst,
}


def policy(name: str) -> Policy:
    """Make a policy by its name on the command line."""
    if name not in POLICIES:
        raise ValueError(f"a policy is one of {', '.join(POLICIES)}, got {name!r}")
    return POLICIES[name]()

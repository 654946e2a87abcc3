"""Policies: in what order those who wait are admitted. By arrival, but for head starts, and none is without bound."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from phase0_request.request import Request
from phase1_kv_pool.cache import KVCache

LEVELS = 8  # of priority either side of 0; what lies beyond counts as the outermost


class Policy(Protocol):
    """A policy gives a request a head start of some seconds over those who came before it.

    None gives more than `bound`. So a request that could start is never passed by one that arrives more than `bound`
    seconds after it: whoever waits ages, and in the end nobody is before it. Two cannot start yet, and meanwhile anyone
    may pass them, since it costs them nothing:

    - a long prompt behind others, until those have computed theirs: half of what a step gives to prompts is for them;
    - who waits for a prefix, until the other has computed what they have in common, or leaves.
    """

    @property
    def bound(self) -> float: ...

    def rank(self, request: Request) -> float:
        """When the request counts as having arrived. Asked once, at submission. The last in rank is preempted first."""
        ...

    def order(self, first: Sequence[Request], cache: KVCache) -> Sequence[Request]:
        """The first few that may enter, by rank: in which order they are admitted now."""
        ...


@dataclass(frozen=True, slots=True)
class FirstComeFirstServed:
    """By arrival and nothing else."""

    @property
    def bound(self) -> float:
        return 0.0

    def rank(self, request: Request) -> float:
        return request.arrival

    def order(self, first: Sequence[Request], cache: KVCache) -> Sequence[Request]:
        return first


@dataclass(frozen=True, slots=True)
class ByPriority:
    """A level of priority is worth so many seconds of waiting. Lower levels go first."""

    seconds: float = 30.0

    def __post_init__(self) -> None:
        _check_seconds(self.seconds)

    @property
    def bound(self) -> float:
        return 2 * LEVELS * self.seconds

    def rank(self, request: Request) -> float:
        # region exercise 5.4
        level = min(max(request.priority, -LEVELS), LEVELS)
        return request.arrival + level * self.seconds
        # endregion

    def order(self, first: Sequence[Request], cache: KVCache) -> Sequence[Request]:
        return first


@dataclass(frozen=True, slots=True)
class LongestPrefixFirst:
    """Prompts whose beginning is cached go first, while it is: one that is all cached is worth so many seconds. It
    goes before the few that may enter next to it, not before a whole line: that would be to look it up for everyone."""

    seconds: float = 30.0

    def __post_init__(self) -> None:
        _check_seconds(self.seconds)

    @property
    def bound(self) -> float:
        return self.seconds

    def rank(self, request: Request) -> float:
        return request.arrival

    def order(self, first: Sequence[Request], cache: KVCache) -> Sequence[Request]:
        def counts_as(request: Request) -> float:
            return request.arrival - self.seconds * cache.cached_tokens(request) / request.total

        return sorted(first, key=counts_as)


POLICIES: dict[str, type[FirstComeFirstServed] | type[ByPriority] | type[LongestPrefixFirst]] = {
    "fcfs": FirstComeFirstServed,
    "priority": ByPriority,
    "longest-prefix": LongestPrefixFirst,
}


def policy(name: str) -> Policy:
    """A policy by its name, as a command line gives it."""
    if name not in POLICIES:
        raise ValueError(f"a policy is one of {', '.join(POLICIES)}, got {name!r}")
    return POLICIES[name]()


def _check_seconds(seconds: float) -> None:
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 <= seconds < float("inf"):
        raise ValueError(f"seconds must be a finite number from 0, got {seconds!r}")

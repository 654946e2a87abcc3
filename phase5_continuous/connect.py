"""Connects the extras of this phase, as far as they are there."""

from collections.abc import Callable
from importlib.util import find_spec

from phase5_continuous.turns import OneQueue, Turns


def turns() -> Callable[[int | None], Turns]:
    """Makes the queue of an engine: tenants take turns, or without extras, requests by rank alone."""
    if find_spec("phase5_continuous.extras") is None:
        return OneQueue
    from phase5_continuous.extras.fairness import FairQueues

    return FairQueues

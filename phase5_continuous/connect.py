"""The one module of phase 5 that knows its extras."""

from collections.abc import Callable, Mapping
from typing import Any

from phase0_request.checks import check_extras, has_extras
from phase5_continuous.turns import OneQueue, Turns

PACKAGE = "phase5_continuous"


def turns() -> Callable[[int | None], Turns]:
    """Makes the queue of an engine: tenants take turns, or without extras, requests by rank alone."""
    if not has_extras(PACKAGE):
        return OneQueue
    from phase5_continuous.extras.fairness import FairQueues

    return FairQueues


def check_speculation(name: str, config: Mapping[str, Any]) -> None:
    """ValueError if speculation cannot be as its config describes it."""
    check_extras(PACKAGE, name)
    from phase5_continuous.extras.speculation.speculation import speculation_of

    speculation_of(config)

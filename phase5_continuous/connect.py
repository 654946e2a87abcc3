"""The one module of phase 5 that knows its extras."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from phase0_request.support.checks import check_extras, has_extras
from phase5_continuous.turns import OneQueue, Turns

if TYPE_CHECKING:
    from phase2_prefill_decode.engine import Engine
    from phase5_continuous.scheduler import Extender, Scheduler

PACKAGE = "phase5_continuous"


def turns() -> Callable[[int | None], Turns]:
    """Makes the queue of an engine: tenants take turns, or without extras, requests by rank alone."""
    if not has_extras(PACKAGE):
        return OneQueue
    from phase5_continuous.extras.fairness import FairQueues

    return FairQueues


def extender_of(config: Mapping[str, Any]) -> "Extender | None":
    """Make the extender that a speculative config describes."""
    check_extras(PACKAGE, "speculative_config")
    from phase5_continuous.extras.speculation.speculation import speculation_of

    return speculation_of(config)


def connect_drafter(extender: "Extender", engine: "Engine[Scheduler]") -> None:
    """Load the draft model of an engine, if its extender uses one."""
    from phase5_continuous.extras.speculation.draft_loading import drafter_for

    drafter_for(extender, engine)


def check_speculation(name: str, config: Mapping[str, Any]) -> None:
    """ValueError if speculation cannot be configured like this."""
    check_extras(PACKAGE, name)
    from phase5_continuous.extras.speculation.speculation import speculation_of

    speculation_of(config)

"""LoopHooks: calls from the engine process's loop to an extra, which observes the steps or works beside them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from phase0_request.core import EngineCore
from phase0_request.request import Request
from phase5_continuous.scheduler import Scheduler


def _nothing(*_: object) -> None:
    pass


def _never() -> bool:
    return False


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopHooks:
    """An extra's side in the engine's process. Hooks that are not set do nothing."""

    name: str = ""  # of its messages to and from the HTTP process
    descriptors: Sequence[int] = ()  # an idle engine wakes up when one is readable
    woken: Callable[[], object] = _nothing  # called when a descriptor is readable
    is_due: Callable[[], bool] = _never  # whether it must be called soon: then an idle engine sleeps for a moment only
    before_step: Callable[[], object] = _nothing  # a turn begins, which runs a step if there is work
    no_step: Callable[[], object] = _nothing  # a turn has ended without a step
    # What to add to the Progress of an event, of the request, the token, and what its Outcome added.
    report: Callable[[Request, int | None, object], bytes | None] = _nothing
    received: Callable[[bytes], object] = _nothing  # a message has come


Send = Callable[[str, bytes], None]  # a message to the HTTP process: the name of its extra, and the body
Extra = Callable[[EngineCore[Scheduler, Any], Send], LoopHooks]  # called once, when the loop of this core begins

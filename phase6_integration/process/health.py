"""Health: the state of the engine, as clients and supervisors see it."""

from enum import Enum


class Health(Enum):
    LOADING = "loading"  # for the first time, or again after a failure
    READY = "ready"
    DRAINING = "draining"  # refuses new requests; running ones are completed
    HUNG = "hung"  # has sent nothing for too long; for good
    DEAD = "dead"  # for good
    LOST = "lost"  # of many replicas, the one that ran a request
    STOPPED = "stopped"  # closed, or never started


class UnavailableError(RuntimeError):
    """The engine cannot take requests: `health` and `reason` say why."""

    def __init__(self, health: Health, reason: str) -> None:
        super().__init__(f"the engine is {health.value}: {reason}")
        self.health = health
        self.reason = reason

"""Phase 5, deciding: the scheduler and its policies, the loop, and the simulator that runs both without a model."""

from phase5_continuous.core import EngineCore, Step
from phase5_continuous.deadlines import Deadlines
from phase5_continuous.policies import ByPriority, FirstComeFirstServed, LongestPrefixFirst, policy
from phase5_continuous.scheduler import Scheduler

__all__ = [
    "ByPriority",
    "Deadlines",
    "EngineCore",
    "FirstComeFirstServed",
    "LongestPrefixFirst",
    "Scheduler",
    "Step",
    "policy",
]
